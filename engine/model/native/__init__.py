"""A model on a CPU, computed by the C++ code in `src/kernels`: layers, attention, passes,
sampling.
"""
