"""The lease protocol between a source and a sink of KV, as state machines without I/O."""
