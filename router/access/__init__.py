"""Access to the API: the keys and their file, their limits, and the guard that checks requests."""
