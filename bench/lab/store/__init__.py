"""`baton bench store`: what a KV store saves, its limits, and its cost to running streams."""
