"""The processes of a worker that spans several devices, and their messages."""
