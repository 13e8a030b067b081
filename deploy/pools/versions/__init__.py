"""Versions of the model that are served: how each comes, takes over from others, and goes."""
