"""Converts the fields of a body to the sampling parameters and limits that workers use.

The number of log-probabilities is limited. A log-probability takes some 30 to 70 bytes of an
answer, and is kept until it is sent. The limits apply to streams too, since a client may read
slowly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from engine.grammar.tokens import TokenRules
from engine.messages import Grammar, Limits, Sampling, ThinkingMarks
from router.gateway.requests.body import (
    MAX_BEAM_TOKENS,
    UINT64_MASK,
    Body,
    check_in_vocabulary,
)
from router.gateway.requests.field_table import CHAT
from router.inbox.api_errors import context_exceeded, invalid_value, no_room
from router.text.forms.chosen import HERMES, AnswerParsing
from router.text.forms.thinking import BEGIN, END
from router.text.structured import Structure, check_combination, structure_of
from router.text.tokenizer import TextModel

MAX_SCORES = 2**18  # maximum log-probabilities in all answers together, and in all prompts together
MAX_ID_DIGITS = 10
MAX_WRONG_SHOWN = 8  # maximum wrong keys that an error lists


def checked_structure(
    fields: dict[str, Any], text: TextModel, *, is_parsed: bool = True
) -> Structure:
    """Returns the structure of the answer that the fields request. Raises ApiError.

    If `is_parsed` is not set, the structure does not use the marks of the model's form.

    `router.gateway.requests.grammar_checker` decides if workers can follow the structure's grammar.
    """
    try:
        form = text.forms.calls if is_parsed else HERMES
        structure = structure_of(fields, token_of=text.added_token_id, form=form)
        check_combination(structure, fields)
    except InvalidRequest as error:
        raise invalid_value(error.message, error.param) from error
    return structure


def sampling_of(
    body: Body, *, text: TextModel, random_seed: int, grammar: Grammar | None = None
) -> Sampling:
    """Returns the sampling parameters. `random_seed` is used if the client gave no seed."""
    seed = random_seed if body.seed is None else body.seed
    model, vocab_size = text.defaults, text.vocab_size
    logprobs, penalty = body.num_top_logprobs, body.repetition_penalty
    if logprobs is None and body.num_candidates > body.num_choices:
        logprobs = 0  # the ranking of candidates needs log-probabilities
    return Sampling(
        temperature=model.temperature if body.temperature is None else body.temperature,
        top_p=model.top_p if body.top_p is None else body.top_p,
        top_k=min(max(model.top_k if body.top_k is None else body.top_k, 0), vocab_size),
        min_p=model.min_p if body.min_p is None else body.min_p,
        seed=seed & UINT64_MASK,
        repetition_penalty=model.repetition_penalty if penalty is None else penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, vocab_size) if body.logit_bias else (),
        grammar=grammar,
        logprobs=logprobs,
    )


def behind_thinking(
    structure: Structure, text: TextModel, reader: AnswerParsing | None
) -> Grammar | None:
    """Returns the structure's grammar. The grammar applies after any reasoning."""
    grammar = structure.grammar
    if grammar is None or reader is None or reader.forms.thinking is None:
        return grammar
    begin, end = map(text.added_token_id, (BEGIN, END))
    if begin is None or end is None or reader.is_thinking is False:
        return grammar
    marks = ThinkingMarks(begin, end, is_inside=bool(reader.is_thinking))
    return msgspec.structs.replace(grammar, thinking=marks)


def token_grammar(body: Body, text: TextModel, structure: Structure) -> Grammar | None:
    """Returns the grammar of `allowed_token_ids` and `bad_words`; None without these fields.

    Raises ApiError.
    """
    if not (body.allowed_token_ids or body.bad_words):
        return None
    if structure.grammar is not None:
        name = "allowed_token_ids" if body.allowed_token_ids else "bad_words"
        raise invalid_value(f"{name} cannot be combined with {structure.param}", name)
    allowed = body.allowed_token_ids or None
    check_in_vocabulary(allowed or (), text.vocab_size, "allowed_token_ids")
    banned = {
        tuple(token_ids)
        for word in body.bad_words or ()
        for token_ids in text.spellings(word)
        if max(token_ids) < text.vocab_size  # otherwise the model cannot produce it
    }
    single = {sequence[0] for sequence in banned if len(sequence) == 1}
    if allowed is not None and single.issuperset(allowed):
        message = "bad_words rule out all tokens of allowed_token_ids"
        raise invalid_value(message, "bad_words")
    return TokenRules(
        None if allowed is None else tuple(sorted(set(allowed))), tuple(sorted(banned))
    ).grammar()


def nth_seed(sampling: Sampling, index: int) -> Sampling:
    """Returns the sampling parameters for the choice with this index.

    Choice 0 has the same parameters as a request with one choice.
    """
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & UINT64_MASK)


def check_choices(body: Body, max_choices: int, max_batch_choices: int) -> None:
    """Raises ApiError if a request asks for more answers than the operator allows.

    `max_choices` limits the answers to one prompt, `max_batch_choices` the answers to all prompts.
    """
    num_each = body.num_candidates
    for name, count in (("n", body.num_choices), ("best_of", num_each)):
        if count > max_choices:
            raise invalid_value(f"{name} is {count}; at most {max_choices} are allowed", name)
    num_prompts = body.num_prompts
    if num_prompts == 1:
        return
    max_batch_choices = max(max_batch_choices, body.max_inputs)
    if num_prompts * num_each > max_batch_choices:
        message = (
            f"{num_prompts} prompts with {num_each} choices each are too many; "
            f"at most {max_batch_choices} answers to one request are allowed"
        )
        raise invalid_value(message, body.prompt_field)


def limits_of(
    body: Body,
    *,
    prompt_len: int,
    context_len: int,
    model_max_tokens: int | None = None,
    stop_token_ids: Sequence[int],
) -> Limits:
    """Returns the limits of an answer, with `stop_token_ids` and the client's stop tokens.

    Raises ApiError.

    If the request has no maximum length, the model's default is used. Without a default of the
    model, the API's default is used.
    """
    max_tokens, room = body.wanted_tokens, context_len - prompt_len
    if room < 1:
        raise no_room(context_len, prompt_len, body.prompt_field)
    if max_tokens is None:
        default = model_max_tokens or body.default_tokens
        if body.use_beam_search and default is not None:
            default = min(default, MAX_BEAM_TOKENS)
        bounds = (room, default, most_scored_tokens(body))
        max_tokens = min(bound for bound in bounds if bound is not None)
    elif max_tokens > room:
        message = (
            f"This model's maximum context length is {context_len} tokens. However, you requested "
            f"{prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} in the "
            "answer)"
        )
        raise context_exceeded(message, "max_tokens")
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"min_tokens is {min_tokens}, more than the {max_tokens} tokens allowed"
        raise invalid_value(message, "min_tokens")
    return Limits(
        max_len=prompt_len + max_tokens,
        min_len=prompt_len + min_tokens,
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *(body.stop_token_ids or ())])),
        prompt_len=prompt_len,
    )


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    wrong = [key for key in biases if not _is_token_id(key)]
    if wrong:
        shown = ", ".join(repr(key[:40]) for key in wrong[:MAX_WRONG_SHOWN])
        raise invalid_value(f"logit_bias: no token ids: {shown}", "logit_bias")
    token_ids = list(map(int, biases))
    check_in_vocabulary(token_ids, vocab_size, "logit_bias")
    if len(set(token_ids)) < len(token_ids):
        raise invalid_value("logit_bias names a token id twice", "logit_bias")
    return tuple(zip(token_ids, biases.values(), strict=True))


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS


def check_answer_scores(body: Body) -> None:
    """Raises ApiError if the answers would have too many log-probabilities.

    Called before tokenising.
    """
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
    """Returns the maximum tokens of an answer whose log-probabilities fit the limit.

    Returns None if the request has no log-probabilities.
    """
    num_each = _num_each(body)
    if num_each is None:
        return None
    return max(MAX_SCORES // (body.num_prompts * body.num_candidates * num_each), 1)


def check_prompt_scores(body: Body, prompt_lens: Sequence[int]) -> None:
    """Raises ApiError if the prompts, with their echoes, would have too many log-probabilities."""
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
    """Returns the number of log-probabilities per token; None without log-probabilities.

    The sampled token's own and the alternatives are counted.
    """
    num_top = body.num_top_logprobs
    return None if num_top is None else 1 + num_top


def _param(body: Body) -> str:
    """Returns the name of the field that sets the number of log-probabilities."""
    return "top_logprobs" if body.endpoint == CHAT else "logprobs"
