"""Eviction of a tier of the store: which blocks leave when room is needed. Pure.

`LeafWorth` is the one to begin with: it gains most where the tier is small beside the traffic, and
where clients give hints. `LeafLru` costs least time, and does as well where the tier holds
nearly all blocks that are used again. `docs/benchmarks.md` has figures of both.
"""
