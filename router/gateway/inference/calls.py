"""Converts a ModelInferRequest to the JSON body of a completion and the form of its answer. Pure.

The tensors have the names of Triton's vLLM backend. All tensors except the prompt are optional:

    text_input               BYTES   a prompt, or several as a batch; or
    input_ids                INT32 or INT64 [tokens] or [1, tokens], a prompt
    sampling_parameters      BYTES   a JSON object with fields of /v1/completions
    stream                   BOOL    true: send each piece of the answer at once
    exclude_input_in_output  BOOL    false: the text begins with the prompt, the default of a
                                     whole answer; a stream cannot
    return_finish_reason, return_cumulative_logprob, return_logprobs, return_num_input_tokens,
    return_num_output_tokens  BOOL   true: send this further output

Fields may also be `parameters` of the request. Numbers may be texts, as in Triton's examples. The
body is handled like an HTTP body, so that checks and error messages are the same as over HTTP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from router.gateway.answering import ID_HEADER, TIMEOUT_HEADER
from router.gateway.inference.tensors import Tensor, read_tensors
from router.gateway.requests.completion import CompletionBody
from router.gateway.versions import VERSION_HEADER
from router.inbox.api_errors import ApiError, invalid_value

TEXT_OUTPUT = "text_output"
SCORES_OUTPUT = "logprobs"
# Outputs and their types. An input `return_…` switches on each output except the text.
OUTPUTS = {
    TEXT_OUTPUT: "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    SCORES_OUTPUT: "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
_SCORES = ("cumulative_logprob", SCORES_OUTPUT)
_SWITCHES = (
    "stream",
    "exclude_input_in_output",
    *(f"return_{name}" for name in OUTPUTS if name != TEXT_OUTPUT),
)
INPUTS = {
    "text_input": "BYTES",
    "input_ids": "INT64",
    "sampling_parameters": "BYTES",
    **dict.fromkeys(_SWITCHES, "BOOL"),
}
# Fields of a completion that have a tensor of their own, or whose results have no output.
_PLACES = {
    "prompt": "use the tensor text_input or input_ids",
    "model": "use model_name",
    "stream": "use the tensor stream",
    "stream_options": "use the tensors return_num_input_tokens and return_num_output_tokens",
    "echo": "use the tensor exclude_input_in_output",
    "prompt_logprobs": "no output shows them",
    "return_token_ids": "no output shows them",
    "return_tokens_as_token_ids": "the output logprobs has ids always",
}
# Each response shows if it is the last of its stream, so an empty last response is not needed.
_WITHOUT_EFFECT = "triton_enable_empty_final_response"
_TIMEOUT = "timeout"  # a timeout in microseconds, which Triton's clients send


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a response contains in addition to the answer itself."""

    id: str
    outputs: frozenset[str]
    is_raw: bool
    streams: bool
    has_prompt: bool  # True if the output text begins with the prompt
    prompts: tuple[str, ...] | None  # None: the client gave token ids

    @property
    def has_scores(self) -> bool:
        """True if the client wants log-probabilities for each token."""
        return SCORES_OUTPUT in self.outputs


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """A request converted to a completion, not checked yet: its JSON body and HTTP headers."""

    data: bytes
    headers: dict[str, str]
    form: AnswerForm


def read_call(request: Any) -> InferenceCall:
    """Converts a ModelInferRequest. Raises ApiError that names the invalid tensor or field."""
    tensors = read_tensors(request)
    if unknown := next((name for name in tensors if name not in INPUTS), None):
        raise _fault(unknown, f"there is no such input; expected {', '.join(INPUTS)}")
    switches = {name: _switch(name, tensors.get(name)) for name in _SWITCHES}
    streams = bool(switches["stream"])
    excludes = switches["exclude_input_in_output"]
    if streams and excludes is False:
        raise _fault("exclude_input_in_output", "must be true in a stream")
    fields, headers = _fields(request, tensors)
    outputs = _outputs(request, switches)
    if fields.get("logprobs") is None and outputs.intersection(_SCORES):
        fields["logprobs"] = 0
    texts, ids = _prompts(tensors)
    fields["prompt"] = ids if texts is None else texts[0] if len(texts) == 1 else texts
    fields["stream"] = streams
    if request.model_name:
        fields["model"] = request.model_name
    form = AnswerForm(
        id=request.id,
        outputs=outputs,
        is_raw=bool(request.raw_input_contents),
        streams=streams,
        has_prompt=not (streams if excludes is None else excludes),
        prompts=texts,
    )
    return InferenceCall(msgspec.json.encode(fields), headers, form)


def _fields(request: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the fields of the JSON body, and the headers with which an HTTP client would send
    them.
    """
    headers: dict[str, str] = {}
    if request.id:
        headers[ID_HEADER] = request.id
    if request.model_version:
        headers[VERSION_HEADER] = request.model_version
    given = {name: _value(name, each) for name, each in request.parameters.items()}
    given.pop(_WITHOUT_EFFECT, None)
    if (timeout_us := given.pop(_TIMEOUT, None)) is not None:
        if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or timeout_us <= 0:
            raise _fault(_TIMEOUT, f"is {timeout_us!r}; expected microseconds above 0")
        headers[TIMEOUT_HEADER] = f"{timeout_us / 1e6:.6f}"
    sampling = _sampling_parameters(tensors.get("sampling_parameters"))
    if twice := next((name for name in sampling if name in given), None):
        raise _fault(twice, "is in sampling_parameters and in parameters")
    fields = given | sampling
    for name in fields:
        if (place := _PLACES.get(name)) is not None:
            raise _fault(name, f"is not allowed here: {place}")
    return {name: _number(name, value) for name, value in fields.items()}, headers


def _outputs(request: Any, switches: Mapping[str, bool | None]) -> frozenset[str]:
    """Returns the names of outputs that the request lists or switches on."""
    named = [each.name for each in request.outputs]
    for name in named:
        if name not in OUTPUTS:
            raise _fault(name, f"there is no such output; expected {', '.join(OUTPUTS)}")
    if named:
        return frozenset(named)
    return frozenset(name for name in OUTPUTS if switches.get(f"return_{name}")) | {TEXT_OUTPUT}


def _prompts(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    """Returns texts and token ids of prompts: either texts and no ids, or None and one prompt's
    ids.
    """
    texts, ids = tensors.get("text_input"), tensors.get("input_ids")
    if (texts is None) == (ids is None):
        raise _fault("text_input", "give either text_input or input_ids")
    if texts is not None:
        if not texts.values:
            raise _fault("text_input", "has no prompt")
        numbers = range(len(texts.values))
        return tuple(_text("text_input", texts, index) for index in numbers), ()
    assert ids is not None
    if ids.datatype not in ("INT32", "INT64"):
        raise _fault("input_ids", f"has the type {ids.datatype}; expected INT32 or INT64")
    if math.prod(ids.shape[:-1]) != 1:
        raise _fault("input_ids", f"the shape is {list(ids.shape)}; expected [1, tokens]")
    return None, ids.values


def _sampling_parameters(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    text = _only(_text, "sampling_parameters", tensor)
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _fault("sampling_parameters", f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _fault("sampling_parameters", "is no JSON object")
    return fields


def _switch(name: str, tensor: Tensor | None) -> bool | None:
    if tensor is None:
        return None
    if tensor.datatype != "BOOL" or len(tensor.values) != 1:
        shape = list(tensor.shape)
        raise _fault(name, f"has the type {tensor.datatype} {shape}; expected BOOL [1]")
    return bool(tensor.values[0])


def _only(read: Any, name: str, tensor: Tensor) -> Any:
    if len(tensor.values) != 1:
        raise _fault(name, f"has {len(tensor.values)} items; expected one")
    return read(name, tensor, 0)


def _text(name: str, tensor: Tensor, index: int) -> str:
    if tensor.datatype != "BYTES":
        raise _fault(name, f"has the type {tensor.datatype}; expected BYTES")
    try:
        return str(tensor.values[index], "utf-8")
    except UnicodeDecodeError as error:
        raise _fault(name, f"is not UTF-8: {error.reason} at byte {error.start}") from error


def _value(name: str, given: Any) -> Any:
    """Returns the Python value of an InferParameter. Raises ApiError."""
    field = given.WhichOneof("parameter_choice")
    if field is None:
        raise _fault(name, "has no value")
    value = getattr(given, field)
    if isinstance(value, float) and not math.isfinite(value):
        raise _fault(name, f"is {value}; expected a finite number")
    return value


def _number(name: str, value: Any) -> Any:
    """Converts a text to a number or a boolean, if the completion's field has no text values."""
    if isinstance(value, str) and name in _textless_fields():
        try:
            return msgspec.json.decode(value.strip().lower())
        except msgspec.DecodeError:
            return value  # a later check names the field
    return value


@cache
def _textless_fields() -> frozenset[str]:
    """Returns the names of a completion's fields whose type has no text."""
    hints = get_type_hints(CompletionBody)
    names = CompletionBody.__struct_fields__
    return frozenset(name for name in names if not _takes_text(hints[name]))


def _takes_text(kind: Any) -> bool:
    return kind is str or any(_takes_text(part) for part in get_args(kind))


def _fault(name: str, what: str) -> ApiError:
    return invalid_value(f"{name[:64]}: {what}", name[:64])
