"""Eviction policies of a store's tiers: they choose the blocks to evict. Pure.

`LeafWorth` is the default. It gains most if the tier is small compared with the traffic, or if
clients send hints. `LeafLru` takes less time, and is as good if the tier is large enough for nearly
all blocks that are used again. `docs/benchmarks.md` has figures for both.
"""
