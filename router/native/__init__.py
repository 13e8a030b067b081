"""Python side of the prefix index and of the placement of requests in C++ (`src/router`)."""
