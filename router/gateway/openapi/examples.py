"""Example bodies in the OpenAPI document, by operation and name. A test sends each of them."""

from typing import Any

_HELLO = [{"role": "user", "content": "Hello"}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "post /v1/chat/completions": {
        "a message": {"messages": _HELLO, "max_tokens": 32},
        "a stream": {
            "messages": _HELLO,
            "max_tokens": 32,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "tools": {
            "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
            "tools": [_WEATHER],
        },
        "structured output": {
            "messages": _HELLO,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "greeting",
                    "schema": {
                        "type": "object",
                        "properties": {"text": {"type": "string"}},
                        "required": ["text"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    },
    "post /v1/completions": {
        "a text": {"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0},
        "token ids": {"prompt": [72, 101, 108, 108, 111], "max_tokens": 8, "stream": True},
    },
    "post /v1/embeddings": {
        "texts": {"input": ["Hello", "Good day"]},
        "numbers in base64": {"input": "Hello", "encoding_format": "base64"},
    },
    "post /v1/responses": {
        "a text": {"input": "Hello", "instructions": "Answer briefly.", "max_output_tokens": 32},
        "a stream": {"input": "Hello", "stream": True, "store": False},
    },
    "post /v1/pins": {
        "a system prompt": {
            "messages": [{"role": "system", "content": "Answer briefly. " * 8}],
            "add_generation_prompt": False,
        },
    },
    "post /tokenize": {
        "a text": {"prompt": "Hello", "return_token_strs": True},
        "messages": {"messages": _HELLO},
    },
    "post /detokenize": {"tokens": {"tokens": [72, 101, 108, 108, 111]}},
}
