"""A request machine's events and effects, recorded so that they can be replayed."""
