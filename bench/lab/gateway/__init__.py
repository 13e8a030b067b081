"""`baton bench gateway`: what the gateway costs, in front of a worker that computes nothing."""
