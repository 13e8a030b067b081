"""Workers of the pools: records of workers, events about workers, and their next moves."""
