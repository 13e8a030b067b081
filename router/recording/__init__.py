"""What went into a request machine and what came out, kept so that it can be replayed."""
