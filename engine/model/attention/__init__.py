"""Attention over paged KV, and how a transformers model reaches it."""
