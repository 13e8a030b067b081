"""The index of prefixes and the placement of requests, with `src/router`."""
