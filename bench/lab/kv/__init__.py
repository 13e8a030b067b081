"""`baton bench kv`: the speed of KV transfers, compared with the machine's limits and with
peers.
"""
