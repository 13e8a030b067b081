"""Computes how many workers each pool should have, from the reported load. Pure."""
