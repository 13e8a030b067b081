"""The processes of a worker that spans several devices, and what they say to one another."""
