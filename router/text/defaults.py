"""The sampling and the length that a model's authors recommend: a checkpoint's defaults.

`generation_config.json` is used where a client says nothing, as by vLLM with
`--generation-config auto`.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import CheckpointError

FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values of the file; None where it has none. They have the ranges of a request's fields."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


NO_DEFAULTS = SamplingDefaults()


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Reads a checkpoint's defaults. Raises CheckpointError for one that no request may have."""
    path = directory / FILE
    if not path.is_file():
        return NO_DEFAULTS
    try:
        return msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}; --generation-config none ignores it") from error
