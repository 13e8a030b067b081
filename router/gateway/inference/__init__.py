"""The Open Inference Protocol over gRPC, as Triton with vLLM speaks it."""
