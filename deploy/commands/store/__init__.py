"""`baton store`: the contents of the stores of KV, and orders to the stores."""
