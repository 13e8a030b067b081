"""Sessions between processes: gRPC streams, CURVE on ZeroMQ, proofs of the secret."""
