"""Copies and seals the bytes of many KV records at once, with `src/transfer`."""
