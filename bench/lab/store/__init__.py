"""`baton bench store`: the time that a KV store saves, its limits, and its cost to running
streams.
"""
