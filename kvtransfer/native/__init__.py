"""Copies, checks and converts the bytes of many KV records at once, in C++.

It is built on first use with the machine's compiler (`engine.native_build`), and called through
ctypes, so other threads run meanwhile. If it cannot be built, numpy does the same, more slowly.
"""
