"""Which workers and gateways are started, flipped, drained and stopped. Pure."""
