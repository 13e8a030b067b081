"""Kernels for CPUs in C++: linear layers, paged attention, a decoder's forward pass, sampling.

They are built on first use with the machine's own compiler, kept in the user's cache folder
(`engine.native_build`), and called through ctypes (`library`). If they cannot be built, plain torch
does the work.
"""
