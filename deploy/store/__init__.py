"""The store's process, which keeps KV blocks for a node: its shell, its tiers, and its links to
workers.
"""
