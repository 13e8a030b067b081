"""Sessions between processes: frames over TCP, CURVE on ZeroMQ, proofs of the secret."""
