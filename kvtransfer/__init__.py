"""KV transfer between workers: the protocol of leases and pulls, the transports, and the
endpoint.
"""
