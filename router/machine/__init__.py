"""The life of a request, decided without I/O: admission, placement, failures, moves."""
