"""`baton bench chaos`: load, faults, and a checker that looks at every stream."""
