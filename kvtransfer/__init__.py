"""KV transfer between workers by lease and pull: protocol, transports, and endpoint."""
