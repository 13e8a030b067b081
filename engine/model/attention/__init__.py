"""Attention over paged KV, and the hook that connects it to transformers models."""
