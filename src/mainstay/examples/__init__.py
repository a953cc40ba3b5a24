"""Programs that are shipped: `mainstay demo` kills an agent that books a `trip` and starts it again."""
