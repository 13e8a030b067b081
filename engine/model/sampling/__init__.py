"""Choosing tokens from logits, and verifying drafted tokens."""
