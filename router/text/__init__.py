"""Converts messages to token ids and back: templates, tokenizers, tool calls, structured output."""
