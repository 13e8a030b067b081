"""`baton bench engine`: compares one engine with its peers and with the machine's limits."""
