"""Validates texts against schemas, in a process of its own.

    python -m bench.lab.schemas.validator

A pattern of a schema may take Python's expressions for ever, so the driver sets a deadline.
"""

import json
import sys
from typing import Any, ClassVar

from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator, validator_for

from bench.peers.driver import drive, stdout_for_answers

# The library checks these without another package.
FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")


class Validator:
    """Answers commands of `bench.lab.schemas.study`."""

    facts: ClassVar[dict[str, object]] = {}

    def validate(self, schema: str, texts: list[str]) -> dict[str, object]:
        """Returns for each text if the schema allows it."""
        decoded: Any = json.loads(schema)
        kind = validator_for(decoded, default=Draft202012Validator)
        validator = kind(decoded, format_checker=FormatChecker(FORMATS))
        return {"valid": [validator.is_valid(json.loads(text)) for text in texts]}


if __name__ == "__main__":
    drive(Validator, sys.stdin, stdout_for_answers())
