"""Shared by all Baton processes: types, messages, KV layout, blocks, sequences, the step loop."""
