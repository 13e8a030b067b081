"""A typical program of langchain-openai users. Argument: the URL of the API."""

import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

ASKED = {"model": "baton-bundled", "base_url": sys.argv[1], "api_key": "none", "temperature": 0}
model = ChatOpenAI(**ASKED, max_tokens=200)
messages = [("system", "Answer."), ("human", "Write a Python function add.")]

short = ChatOpenAI(**ASKED, max_tokens=16, stream_usage=True)
whole = short.invoke(messages)
assert whole.content
assert whole.usage_metadata["total_tokens"] > whole.usage_metadata["output_tokens"] > 0
chunks = list(short.stream(messages))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert [answer.content for answer in short.batch([messages, messages])] == [whole.content] * 2


class Point(BaseModel):
    """A place."""

    x: int = Field(ge=0, le=9)
    name: str = Field(max_length=8)


for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Point, method=method).invoke(messages)
    assert isinstance(found, Point), (method, found)


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


called = model.bind_tools([add], tool_choice="add").invoke(messages)
assert isinstance(called, AIMessage)
(call,) = called.tool_calls
assert call["name"] == "add"
history = [HumanMessage("Add."), called, ToolMessage("3", tool_call_id=call["id"])]
assert short.invoke(history).content is not None

responses = ChatOpenAI(**ASKED, max_tokens=16, use_responses_api=True).invoke(messages)
assert responses.text

assert OpenAI(**ASKED, max_tokens=4).invoke("def f(")
