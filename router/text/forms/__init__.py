"""The forms in which model families write reasoning and tool calls, with their parsers."""
