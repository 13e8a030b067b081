"""`baton bench fluid`: compares fluid pools with walled pools and mixed workers, live and
simulated.
"""
