"""HTTP server of a store."""
