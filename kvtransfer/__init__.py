"""KV moves by lease and pull: the protocol, its backends, and the endpoint that runs them."""
