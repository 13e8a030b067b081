"""`baton bench clients`: the load harness beside another one, on a server of known latencies."""
