"""Bounds on the log-probabilities that one request may ask for.

Each is some 30 to 70 bytes of an answer. They are kept until the answer ends, or until its client
reads on. The bounds hold for streams too, since a client may read slowly.
"""

from collections.abc import Sequence

from router.gateway.requests.field_table import CHAT
from router.gateway.requests.openai_schema import Body
from router.inbox.api_errors import invalid_value

MAX_SCORES = 2**18  # in all answers together, and in all prompts together


def check_answer_scores(body: Body) -> None:
    """Raises ApiError if the answers would have too many. Needs no tokenising."""
    num_each, wanted = _num_each(body), body.wanted_tokens
    if num_each is None or wanted is None:
        return
    num_answers = body.num_prompts * body.num_candidates
    num_scores = num_answers * wanted * num_each
    if num_scores > MAX_SCORES:
        message = (
            f"{num_answers} choices of {wanted} tokens with {num_each} log-probabilities each "
            f"are {num_scores} log-probabilities; at most {MAX_SCORES} are allowed"
        )
        raise invalid_value(message, _param(body))


def most_scored_tokens(body: Body) -> int | None:
    """The longest answer that may have its log-probabilities; None: the bound does not matter."""
    num_each = _num_each(body)
    if num_each is None:
        return None
    return max(MAX_SCORES // (body.num_prompts * body.num_candidates * num_each), 1)


def check_prompt_scores(body: Body, prompt_lens: Sequence[int]) -> None:
    """Raises ApiError if the prompts would have too many, with their echoes."""
    num_each = (
        0 if body.prompt_logprobs is None else body.times_of_prompt * (1 + body.prompt_logprobs)
    )
    if body.echoes_scores:
        num_each += body.num_candidates * (_num_each(body) or 0)
    num_scores = sum(prompt_lens) * num_each
    if num_scores > MAX_SCORES:
        message = (
            f"{sum(prompt_lens)} tokens of prompts with {num_each} log-probabilities each, in all "
            f"choices, are {num_scores} log-probabilities; at most {MAX_SCORES} are allowed"
        )
        name = _param(body) if body.prompt_logprobs is None else "prompt_logprobs"
        raise invalid_value(message, name)


def _num_each(body: Body) -> int | None:
    """The number of log-probabilities for each token: its own and the alternatives."""
    num_top = body.num_top_logprobs
    return None if num_top is None else 1 + num_top


def _param(body: Body) -> str:
    """The field with the number of log-probabilities."""
    return "top_logprobs" if body.endpoint == CHAT else "logprobs"
