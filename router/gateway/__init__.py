"""HTTP: the OpenAI-compatible API in front of a router."""
