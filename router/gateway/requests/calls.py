"""Converts an HTTP body to requests for the router: checks, templates and tokenises the body.

This module does not depend on the form of the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from engine.config import GatewayConfig, RouterConfig
from engine.errors import InvalidRequest
from engine.messages import Limits, RequestId
from engine.net.trust import Secret
from router.access.limits import Tenant
from router.gateway.hints.claims import SessionClaim
from router.gateway.hints.uses import SessionNotes, notes_of
from router.gateway.requests.body import Body, body_of, check_in_vocabulary, unsupported
from router.gateway.requests.field_table import CHAT, EMBEDDINGS
from router.gateway.requests.json_fields import (
    decode_fields,
    ignored_names,
    suggestions,
)
from router.gateway.requests.parameters import (
    behind_thinking,
    check_answer_scores,
    check_choices,
    check_prompt_scores,
    checked_structure,
    limits_of,
    nth_seed,
    sampling_of,
    token_grammar,
)
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER, ServedVersion, Versions
from router.inbox.api_errors import invalid_value
from router.machine.requests import Request
from router.text.embeddings import EmbeddingForm
from router.text.forms.chosen import AnswerParsing
from router.text.structured import FIELDS as STRUCTURE_FIELDS
from router.text.structured import Structure
from router.text.tokenizer import TextModel

MAX_BATCH_TOKENS = 2**20  # maximum tokens of all prompts of a call
MAX_STEP_TOKENS = 2**19  # maximum tokens sent by one step of a beam search


class GatewaySettings(msgspec.Struct, frozen=True):
    """Settings of a gateway, for all versions of the model."""

    secret: Secret  # for tenants' salts: the deployment's secret, or one that outlives it
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()


class ApiCall(msgspec.Struct, frozen=True):
    """A call of an answer endpoint that was received, but not parsed yet."""

    data: bytes
    request_id: RequestId
    random_seed: int
    received_s: float
    tenant: Tenant
    headers: Mapping[str, str]  # header names are in lower case
    client_id: str | None  # id of the call that the client has chosen
    shown_id: str  # the id in the head of the response: the client's own id, if there is one
    timeout_s: float | None  # for the whole answer, counted from `received_s`
    session: SessionClaim | None = None
    # If the client used another API: the names of that API's fields, and a function that returns
    # the names of the client's fields that have no effect.
    own_fields: tuple[str, ...] = ()
    own_ignored: Callable[[Sequence[str]], Sequence[str]] | None = None

    def debugs(self, header: str) -> bool:
        """True if the client asks for a debug header and its key may debug."""
        return self.headers.get(header) == "1" and self.tenant.may_debug


class CheckedCall(msgspec.Struct, dict=True):
    """A call that passed all checks, with its requests. `body` determines the form of the answer.

    Each prompt has the same number of requests. `requests` has first all requests of the first
    prompt, then all requests of the next prompt. The answer has the best `body.num_choices` choices
    of each prompt.
    """

    asked: ApiCall
    body: Body  # the body, without its prompt
    served: ServedVersion
    requests: tuple[Request, ...]
    echoes: tuple[str | None, ...]  # by prompt: the text with which choices begin
    structure: Structure
    reader: AnswerParsing | None  # the parser of answers; None: answers are not parsed
    ignored: tuple[str, ...]  # names of ignored fields
    notes: SessionNotes | None  # None without a session or a store
    embedding: EmbeddingForm | None  # form of embeddings; None: the call wants a text

    def __post_init__(self) -> None:
        """Computes the attributes that writers of answers read."""
        requests, body = self.requests, self.body
        self.first = requests[0]  # the request whose id is the call's id
        self.model = body.model or self.served.model_names[0]  # the name that the client used
        # The number of choices generated for each prompt, and the first request of each prompt.
        self.num_candidates = len(requests) // len(self.echoes)
        self.leaders = requests[:: self.num_candidates]
        self.prompt_len = sum([len(leader.token_ids) for leader in self.leaders])  # in all prompts
        # The client's own stop tokens; an answer reports the stop token at which it ended.
        self.stop_token_ids = frozenset(body.stop_token_ids or ())
        if self.stop_token_ids and not body.ignore_eos:
            self.stop_token_ids -= set(self.served.text.eos_token_ids)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of the call: all prompts and the longest allowed answers."""
        answers = (each.limits.max_len - len(each.token_ids) for each in self.leaders)
        return self.prompt_len + self.body.num_candidates * sum(answers)


NO_STRUCTURE = Structure()


class _Prompt(NamedTuple):
    """A prompt of a call, the limits of its answers, and the text with which the answers begin."""

    token_ids: tuple[int, ...]
    limits: Limits
    echo: str | None


def parse(
    call: ApiCall, body_type: type[Body], versions: Versions, settings: GatewaySettings
) -> CheckedCall:
    """Checks a call, chooses its version and makes its requests. Raises InvalidRequest.

    An error also names fields that may be misspelt, because they may have caused the error.
    """
    fields = decode_fields(call.data, body_type)
    try:
        return _checked(call, fields, body_type, versions, settings)
    except InvalidRequest as error:
        add_suggestions(error, call, ignored_names(call.data, fields, body_type), body_type)
        raise


def add_suggestions(
    error: InvalidRequest, call: ApiCall, names: Sequence[str], body_type: type[Body]
) -> None:
    """Adds suggestions for unknown fields to an error that these fields may have caused."""
    if error.status == HTTPStatus.BAD_REQUEST:
        error.message += suggestions(names, body_type, call.own_fields)


def _checked(
    call: ApiCall,
    fields: dict[str, Any],
    body_type: type[Body],
    versions: Versions,
    settings: GatewaySettings,
) -> CheckedCall:
    body = body_of(fields, body_type)
    served = versions.choose(
        key=call.headers.get(AFFINITY_HEADER) or call.request_id,
        model=body.model,
        version=call.headers.get(VERSION_HEADER),
    )
    text, embedding, structure = served.text, None, NO_STRUCTURE
    if text.embedding is not None or body.endpoint == EMBEDDINGS:
        embedding = body.embedding_form(text)
    if not STRUCTURE_FIELDS.isdisjoint(fields):
        structure = checked_structure(fields, text, is_parsed=body.endpoint == CHAT)
    if body.stop_token_ids:
        check_in_vocabulary(body.stop_token_ids, text.vocab_size, "stop_token_ids")
    if body.num_candidates > 1 or body.num_prompts > 1:
        check_choices(body, settings.gateway.max_choices, settings.gateway.max_batch_choices)
    has_scores = body.num_top_logprobs is not None or body.prompt_logprobs is not None
    if has_scores:
        check_answer_scores(body)
    if body.use_beam_search:
        _check_beams(body, structure, text)
    singles = (body,) if body.num_prompts == 1 else body.singles()
    prompts = _prompts(singles, served, structure)
    if has_scores:
        check_prompt_scores(body, [len(prompt.token_ids) for prompt in prompts])
    if body.use_beam_search:
        _check_steps(body.num_candidates, prompts)
    reader = body.reader(text, structure.calling, prompts[0].token_ids)
    grammar = None
    if body.allowed_token_ids or body.bad_words:
        grammar = token_grammar(body, text, structure)
    elif structure.grammar is not None:
        grammar = behind_thinking(structure, text, reader)
    sampling = sampling_of(
        body,
        text=text,
        random_seed=call.random_seed,
        grammar=grammar,
    )
    min_priority = settings.gateway.min_priority
    priority = max(0, min_priority) if body.priority is None else body.priority
    if priority < min_priority:
        message = f"priority is {priority}; at least {min_priority} is allowed"
        raise invalid_value(message, "priority")
    first = Request(
        call.request_id,
        prompts[0].token_ids,
        sampling,
        prompts[0].limits,
        call.received_s,
        salt=settings.secret.salt(call.tenant.sharing, body.cache_salt or ""),
        client_id=call.client_id or "",
        prompt_logprobs=body.num_scored_prompt,
        priority=priority,
        # The key's name is used first: otherwise each invented `user` would get a fair share.
        tenant=call.tenant.name or body.user or "",
        has_key=bool(call.tenant.name),
        deadline_s=body.slo_ttft_ms and call.received_s + body.slo_ttft_ms / 1e3,
        tpot_bound_s=body.slo_tpot_ms and body.slo_tpot_ms / 1e3,
    )
    num_candidates = body.num_choices if body.use_beam_search else body.num_candidates
    requests = _requests(first, prompts, num_candidates)
    setattr(body, body.prompt_field, [])  # answers do not need the prompt
    ignored = (*structure.unheld, *ignored_names(call.data, fields, body_type))
    notes = None
    if call.session is not None and (block_size := served.port.store_block_size()) is not None:
        notes = notes_of(call.session, block_size, requests[::num_candidates])
    _, _, echoes = zip(*prompts, strict=True)
    return CheckedCall(
        call, body, served, requests, echoes, structure, reader, ignored, notes, embedding
    )


def with_structure(call: CheckedCall, structure: Structure) -> CheckedCall:
    """Returns the call with a looser structure.

    Fields that the looser structure does not enforce are added to the ignored fields.
    """
    grammar = behind_thinking(structure, call.served.text, call.reader)
    requests = tuple(
        replace(each, sampling=replace(each.sampling, grammar=grammar)) for each in call.requests
    )
    ignored = (name for name in call.ignored if name not in call.structure.unheld)
    return replace(
        call, requests=requests, structure=structure, ignored=(*ignored, *structure.unheld)
    )


def _check_beams(body: Body, structure: Structure, text: TextModel) -> None:
    """Raises ApiError for a beam search with a grammar or with too many beams."""
    if structure.grammar is not None:
        raise unsupported("use_beam_search", "with a grammar")
    if 2 * body.num_candidates >= text.vocab_size:
        message = f"a model of {text.vocab_size} tokens cannot have {body.num_candidates} beams"
        raise invalid_value(message, "n")


def _check_steps(width: int, prompts: Sequence[_Prompt]) -> None:
    """Raises ApiError if the steps of a beam search would send too many tokens."""
    num_tokens = width * sum(prompt.limits.max_len for prompt in prompts)
    if num_tokens > MAX_STEP_TOKENS:
        message = (
            f"{width} beams of prompts and answers of this length have {num_tokens} tokens; "
            f"at most {MAX_STEP_TOKENS} are allowed"
        )
        raise invalid_value(message, "use_beam_search")


def _prompts(
    singles: Sequence[Body],
    served: ServedVersion,
    structure: Structure,
) -> list[_Prompt]:
    """Returns the prompts of a call. An InvalidRequest has the index of one of several prompts."""
    prompts: list[_Prompt] = []
    text, max_len, num_tokens = served.text, served.max_len, 0
    for index, single in enumerate(singles):
        try:
            token_ids = tuple(single.encode(text, max_len, structure.tools))
            limits = limits_of(
                single,
                prompt_len=len(token_ids),
                context_len=max_len,
                model_max_tokens=text.defaults.max_new_tokens,
                stop_token_ids=() if single.ignore_eos else text.eos_token_ids,
            )
            echo = single.echoed(token_ids, text) if single.echoes_prompt else None
            prompts.append(_Prompt(token_ids, limits, echo))
        except InvalidRequest as error:
            if len(singles) > 1 and error.param == single.prompt_field:
                error.param = f"{single.prompt_field}[{index}]"
                error.message = f"{error.param}: {error.message}"
            raise
        num_tokens += len(token_ids)
        if index and num_tokens > MAX_BATCH_TOKENS:
            message = f"the first {index + 1} prompts have {num_tokens} tokens"
            message += f"; a batch may have {MAX_BATCH_TOKENS}"
            raise invalid_value(message, single.prompt_field)
    return prompts


def _requests(
    first: Request, prompts: Sequence[_Prompt], num_candidates: int
) -> tuple[Request, ...]:
    """Returns the requests for all prompts, as copies of the first request with the needed
    changes.
    """
    requests: list[Request] = []
    for prompt in prompts:
        leader = first
        if requests:
            leader = replace(
                first,
                request_id=_nth_id(first, len(requests)),
                token_ids=prompt.token_ids,
                limits=prompt.limits,
            )
        requests.append(leader)
        for index in range(1, num_candidates):
            follower = replace(
                leader,
                request_id=_nth_id(first, len(requests)),
                sampling=nth_seed(leader.sampling, index),  # the seed of a separate request
                prompt_logprobs=None,  # only the leader reports the prompt's
                leader=leader.request_id,
            )
            requests.append(follower)
    return tuple(requests)


def _nth_id(first: Request, index: int) -> RequestId:
    return RequestId(f"{first.request_id}-{index}")
