"""`baton bench chaos`: load, faults, and a checker of every streamed answer."""
