"""Eviction of a tier of the store: which blocks leave when room is needed. Pure."""
