"""`baton bench kv`: how fast KV blocks move, beside the machine's limits and peers."""
