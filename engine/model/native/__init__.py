"""A model on a CPU, computed by `src/kernels`: layers, attention, a whole pass, sampling."""
