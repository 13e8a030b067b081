"""`baton bench serve`: sends a load to a running server and measures latency and throughput."""
