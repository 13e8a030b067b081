"""The router: HTTP gateway, request machine, cluster view, placement. KV bytes never pass it."""
