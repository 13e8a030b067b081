"""Calls C++ (`src/transfer`, `src/stream.h`), which copies and seals many KV records at once."""
