"""`baton bench engine`: one engine beside its peers, and beside the machine's limits."""
