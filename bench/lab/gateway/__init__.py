"""`baton bench gateway`: the gateway's delay and CPU time, in front of a worker that computes
nothing.
"""
