"""Processes that a benchmark starts: `baton serve`, single services, driven engines."""
