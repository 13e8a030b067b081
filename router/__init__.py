"""The router: HTTP gateway, request machine, cluster view, placement. It never sees KV bytes."""
