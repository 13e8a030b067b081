"""The lease protocol between a source and a sink of KV, as machines without I/O."""
