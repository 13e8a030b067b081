"""Computes the tokens that a grammar or JSON Schema allows next."""
