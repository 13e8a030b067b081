"""Chooses tokens from logits, and verifies drafted tokens."""
