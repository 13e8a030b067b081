"""Benchmarks: load against a live server, and the common form of all benchmark reports."""
