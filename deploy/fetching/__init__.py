"""Fetches models from hubs, object stores and packages, into a folder of this machine."""
