"""The Open Inference Protocol over gRPC, as Triton with vLLM speaks it."""

import engine.net.grpc_library  # noqa: F401  before libraries that load gRPC without its settings
