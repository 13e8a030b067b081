"""How families of models write reasoning and tool calls, and parsers of what they wrote."""
