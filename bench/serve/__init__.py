"""`baton bench serve`: load on a running server."""
