"""`baton bench validation`: compares the simulator's predictions with a real deployment."""
