"""A typical program of litellm users. Argument: the URL of the API."""

import asyncio
import sys

import litellm

URL = sys.argv[1]
MESSAGES = [{"role": "user", "content": "Write a Python function add."}]
ASKED = {
    "model": "hosted_vllm/baton-bundled",
    "api_base": URL,
    "api_key": "none",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 16,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}

whole = litellm.completion(**ASKED).choices[0].message.content
assert whole
streamed = "".join(
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ASKED, stream=True)
)
assert streamed == whole, (streamed, whole)
assert asyncio.run(litellm.acompletion(**ASKED)).choices[0].message.content == whole

called = litellm.completion(**{**ASKED, "max_tokens": 200}, tools=[TOOL], tool_choice="required")
assert called.choices[0].message.tool_calls[0].function.name == "add"

text = litellm.text_completion(
    model="text-completion-openai/baton-bundled",
    api_base=URL,
    api_key="none",
    prompt="def f(",
    max_tokens=4,
)
assert text.choices[0].text

for model in ("hosted_vllm/baton-bundled", "openai/baton-bundled"):
    try:
        long = [{"role": "user", "content": "word " * 9000}]
        litellm.completion(**{**ASKED, "model": model, "messages": long})
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError(f"{model}: no ContextWindowExceededError")
try:
    litellm.completion(**{**ASKED, "model": "hosted_vllm/unknown"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("no NotFoundError")
