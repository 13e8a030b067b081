"""Wiring: the command, the launchers, the worker host, Ray. Nothing imports this floor."""
