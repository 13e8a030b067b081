"""A typical program of instructor users. Argument: the URL of the API."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=120)


MESSAGES = [{"role": "user", "content": "Extract: Ada is 36."}]
client = OpenAI(base_url=sys.argv[1], api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    person = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="baton-bundled", messages=MESSAGES, response_model=Person, max_tokens=200
    )
    assert isinstance(person, Person), (mode, person)
    assert 0 <= person.age <= 120
