"""`baton bench batches`: the effect of batches on clients, and batches whose server is killed."""
