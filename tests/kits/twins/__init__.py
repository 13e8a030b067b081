"""Slow twins of production code. Tests compare production code with its twin."""
