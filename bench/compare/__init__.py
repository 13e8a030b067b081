"""`baton bench compare`: two reports of one benchmark, side by side."""
