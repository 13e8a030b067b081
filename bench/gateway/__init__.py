"""`baton bench gateway`: what a gateway adds to each request and token."""
