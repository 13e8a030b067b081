"""The Open Inference Protocol over gRPC, compatible with Triton's vLLM backend."""

import engine.net.grpc_library  # noqa: F401  before libraries that load gRPC without its settings
