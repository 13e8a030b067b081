"""Workers of the pools: their records, the events about them, and their next moves."""
