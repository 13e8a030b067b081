"""`baton bench schemas`: how many schemas are followed, how truly, and at what cost."""
