"""Records a request machine's events and effects, so that they can be replayed."""
