"""Fetches models from where they are published, and keeps them in a folder of this machine."""
