"""`baton bench hostile`: a real deployment under hostile clients, beside streams of honest ones."""
