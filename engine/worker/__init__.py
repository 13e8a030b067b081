"""The pure core of a worker: sequences, blocks, batches, events and effects."""
