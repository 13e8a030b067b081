"""Blocks on disk: fixed slots in files, asynchronous I/O, and recovery after any crash."""
