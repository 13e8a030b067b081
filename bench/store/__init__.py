"""`baton bench store`: what a store of KV saves, what limits it, and what it costs others."""
