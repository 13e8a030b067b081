"""KV pools in a device's memory: copies to and from them, and sharing with other processes."""
