"""OpenAI's Responses API: chat completions in the form of items and events, with stored
responses.
"""
