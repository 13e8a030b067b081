"""Blocks on disk: fixed slots in files, asynchronous I/O, and recovery after a crash at any
moment.
"""
