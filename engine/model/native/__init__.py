"""Kernels for CPUs in C++: linear layers, paged attention, a decoder's forward pass, sampling.

Built on first use with the machine's own compiler and kept in the user's cache folder
(`engine.native_build`), called through ctypes (`library`). Where they cannot be built, plain torch
does the work.
"""
