"""`baton bench schemas`: how many JSON schemas are followed, how truly, and at what cost."""
