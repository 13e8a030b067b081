"""`baton bench batches`: clients beside batches, and batches whose server is killed."""
