"""The shell of the pools: it feeds the pool machine with events and carries out its effects."""
