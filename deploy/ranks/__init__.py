"""The processes (ranks) of a worker that spans several devices, and the messages between them."""
