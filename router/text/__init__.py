"""Between messages and token ids: templates, tokenizers, tool calls, structured output."""
