"""The pure core of a worker: sequences, blocks, batches, and the core's events and effects."""
