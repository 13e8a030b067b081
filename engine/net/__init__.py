"""Sessions between processes: frames over TCP, CURVE on ZeroMQ, and proofs of the shared secret."""
