"""Checkpoints: reading, checking and refusing them."""
