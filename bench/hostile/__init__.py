"""`baton bench hostile`: hostile clients and honest clients on one real deployment."""
