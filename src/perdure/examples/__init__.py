"""Programs that are shipped: `perdure demo` kills an agent that books a `trip` and starts it again."""
