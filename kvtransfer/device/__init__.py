"""KV in a device's memory: copies to and from it, and its memory shared with other processes."""
