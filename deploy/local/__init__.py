"""A deployment of plain processes on this machine."""
