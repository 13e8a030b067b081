"""KV pools in a device's memory: copying blocks, and sharing the memory with other processes."""
