"""`baton bench router`: placements on one core, in clusters of 10 to 10,000 workers."""
