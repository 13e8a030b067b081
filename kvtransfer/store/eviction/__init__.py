"""Eviction policies of a store's tiers: they choose the blocks to evict. Pure.

`LeafWorth` is the default. Its gain is largest if the tier is small compared with the traffic, or
if clients send hints. `LeafLru` costs less time. If the tier has room for nearly all blocks that
are used again, `LeafLru` gets as many hits. `docs/benchmarks.md` has figures for both.
"""
