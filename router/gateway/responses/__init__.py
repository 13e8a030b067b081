"""OpenAI's Responses API: a dialect of chat with items, events, and responses that are kept."""
