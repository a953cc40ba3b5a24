"""Pure rules: how a process lives (`process`), and which scopes are suspected of a death (`suspects`)."""
