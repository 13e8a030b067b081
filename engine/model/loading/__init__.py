"""Reads checkpoints, checks them, and refuses checkpoints that cannot be served."""
