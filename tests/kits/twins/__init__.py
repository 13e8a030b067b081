"""Slow twins of production code, which tests compare it with."""
