"""Tracks which worker caches which prefix, from the workers' own events. Pure."""
