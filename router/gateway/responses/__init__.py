"""OpenAI's Responses API: a dialect of chat with items, events, and stored responses."""
