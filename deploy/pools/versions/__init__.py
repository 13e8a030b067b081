"""Versions of the model: orders about them, and rollouts."""
