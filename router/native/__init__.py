"""The prefix index and the placement of requests; the C++ is in `src/router`."""
