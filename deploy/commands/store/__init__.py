"""`baton store`: what the stores of KV hold, and the orders for them."""
