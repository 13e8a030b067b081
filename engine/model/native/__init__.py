"""Kernels for CPUs in C++: linear layers, paged attention, and a whole decoder's forward pass.

Built on first use with the machine's own compiler and kept in the user's cache folder (`build`),
called through ctypes (`library`). Where they cannot be built, plain torch does the work.
"""
