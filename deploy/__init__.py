"""Wiring: the command, the launchers, the worker host, Ray. No other package imports this one."""
