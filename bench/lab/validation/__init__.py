"""`baton bench validation`: the simulator's predictions beside a real deployment."""
