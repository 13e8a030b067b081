"""How model families write reasoning and tool calls, and the parsers of both."""
