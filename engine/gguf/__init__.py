"""Reads GGUF files: the container format, the model and the tokenizer. Needs no torch."""
