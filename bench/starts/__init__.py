"""`baton bench starts`: how long `baton serve` takes until it serves."""
