"""Versions of models: orders about versions, and rollouts."""
