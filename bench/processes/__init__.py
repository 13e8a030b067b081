"""Processes that benchmarks start: `baton serve`, single services, and driven engines."""
