"""Decides which workers and gateways are started, flipped, drained and stopped; does no I/O."""
