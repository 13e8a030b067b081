"""A deployment whose services are processes on this machine."""
