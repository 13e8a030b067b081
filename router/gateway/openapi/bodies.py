"""Schemas and examples of bodies.

The schema of a body is made from the Python type of the decoded body. Fields that are not in the
type are added. A test sends each example.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from router.gateway.batches.pages import MAX_EXPIRY_S, MIN_EXPIRY_S
from router.gateway.openapi.operations import PIN_BODY, TOKENIZE_BODY, UPLOAD_FORM
from router.gateway.pages.tokens import TokenizeOptions
from router.gateway.requests.body import Body
from router.gateway.requests.chat import MAX_MESSAGES, ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.embedding import EmbeddingBody
from router.gateway.requests.field_table import HARMLESS, HONOURED, PLACES, refused_by
from router.text.structured import MAX_CHOICES
from router.text.tools import MAX_TOOLS

Json = dict[str, Any]

REF = "#/components/schemas/{name}"

_FUNCTION: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
# Fields from which an answer's grammar is made. `router.text.structured` checks these fields.
_STRUCTURED: dict[str, Json] = {
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "properties": {
                    "schema": {"type": ["object", "boolean", "string"]},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
    "structured_outputs": {"type": "object"},
    "guided_json": {"type": ["object", "boolean", "string"]},
    "guided_regex": {"type": "string", "minLength": 1},
    "guided_choice": {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": MAX_CHOICES,
    },
    "guided_grammar": {"type": "string", "minLength": 1},
    "regex": {"type": "string", "minLength": 1},
    "ebnf": {"type": "string", "minLength": 1},
    "json_schema": {"type": ["object", "boolean", "string"]},
}
_TOOLS: dict[str, Json] = {
    "tools": {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        },
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}},
                    },
                },
            },
        ]
    },
}

_PROMPT_FIELDS = (
    "model",
    "messages",
    "tools",
    "documents",
    "reasoning_effort",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
)
_UPLOAD_FORM: Json = {
    "description": "An upload.",
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "format": "binary", "description": "a request in each line"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY_S,
            "maximum": MAX_EXPIRY_S,
        },
    },
}


def components_of(types: Iterable[type]) -> dict[str, Json]:
    """Returns the schemas of these types and of all types in their fields, by name."""
    _, components = msgspec.json.schema_components(list(types), ref_template=REF)
    for schema in components.values():
        schema.pop("title", None)
    return components


def body_components() -> dict[str, Json]:
    """Returns the schemas of the bodies of requests for answers and of /tokenize, by name."""
    found = components_of([ChatBody, CompletionBody, EmbeddingBody])
    chat, completion = found["ChatBody"], found["CompletionBody"]
    _complete(chat, ChatBody, _STRUCTURED | _TOOLS)
    _complete(completion, CompletionBody, _STRUCTURED)
    embedding = found["EmbeddingBody"]
    _complete(embedding, EmbeddingBody, {})
    embedding["anyOf"] = [{"required": ["input"]}, {"required": ["messages"]}]
    embedding["properties"]["input"] = _prompt()
    messages = chat["properties"]["messages"]
    messages |= {"minItems": 1, "maxItems": MAX_MESSAGES}
    del messages["default"]
    chat["required"], completion["required"] = ["messages"], ["prompt"]
    completion["properties"]["prompt"] = _prompt()
    found[TOKENIZE_BODY] = _tokenize_body(chat, completion)
    found[PIN_BODY] = {
        "description": "The body of a request whose prompt is meant.",
        "anyOf": [{"$ref": REF.format(name=name)} for name in ("ChatBody", "CompletionBody")],
    }
    found[UPLOAD_FORM] = _UPLOAD_FORM
    return found


def _complete(schema: Json, body_type: type[Body], more: dict[str, Json]) -> None:
    """Adds the fields that are not in the type, and descriptions from the table of fields."""
    properties = schema["properties"]
    for name, field in more.items():
        properties[name] = {"anyOf": [field, {"type": "null"}]}
    for honoured in HONOURED:
        if honoured.endpoint in PLACES[body_type.endpoint]:
            properties[honoured.name]["description"] = honoured.meaning
    for refused in refused_by(body_type.endpoint).values():
        reason = f"Refused, unless the value asks for nothing: {refused.reason}"
        properties[refused.name] = {"enum": _values(refused.harmless), "description": reason}
    for harmless in HARMLESS:
        properties[harmless.name] = {"description": f"Passed over: {harmless.reason}"}


def _values(harmless: Iterable[object]) -> list[object]:
    """Returns the values and null without duplicates. `1` and `1.0` are duplicates in JSON."""
    found = {msgspec.json.encode(_whole(value)): _whole(value) for value in (*harmless, None)}
    return list(found.values())


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompt() -> Json:
    ids = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    batch = {"type": "array", "items": ids, "minItems": 1}
    return {"anyOf": [{"type": "string", "minLength": 1}, ids, texts, batch]}


def _tokenize_body(chat: Json, completion: Json) -> Json:
    """Returns the request fields that change a prompt, and the options of /tokenize."""
    null = {"type": "null"}
    fields = {name: chat["properties"][name] for name in _PROMPT_FIELDS}
    fields["messages"] = {"anyOf": [fields["messages"], null]}
    prompt = {"anyOf": [completion["properties"]["prompt"]["anyOf"][0], null]}
    options = components_of([TokenizeOptions])["TokenizeOptions"]["properties"]
    return {
        "description": (
            "`prompt` or `messages`, and fields that change the prompt. Those of the answer may be "
            "there as well."
        ),
        "type": "object",
        "properties": {"prompt": prompt, **fields, **options},
        "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    }


# Examples of bodies, by operation and name.
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

EXAMPLES: dict[str, dict[str, Json]] = {
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
