"""`baton bench moves`: what a client sees of a sequence that goes on in another worker."""
