"""The process that keeps KV blocks for a node: its shell, its keeper, and its links to workers."""
