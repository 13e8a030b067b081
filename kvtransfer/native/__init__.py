"""Work on the bytes of many KV records at once, in C++.

Built on first use with the machine's own compiler (`engine.native_build`), called through ctypes,
which lets other threads run meanwhile. Where it cannot be built, numpy does the same, more slowly.
"""
