"""Reads GGUF files: the container, and the model and tokenizer that it describes. No torch."""
