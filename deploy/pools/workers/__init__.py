"""Workers of the pools: what is known of each, and what is done with each next."""
