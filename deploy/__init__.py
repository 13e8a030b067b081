"""Wires all packages together: the command, launchers, hosts of services, Ray.

No other package imports `deploy`.
"""
