"""Fetches models from hubs, object stores and Python packages into a folder of this machine."""
