"""`baton bench fluid`: pools that lend each other idle workers, beside walled and mixed ones."""
