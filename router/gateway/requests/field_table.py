"""All fields of requests for answers: honoured, refused and ignored fields, with the reasons.

Clients of vLLM, SGLang and OpenAI send fields that Baton does not have. A field that changes an
answer is refused by name, since an answer without the requested penalty or schema would be wrong. A
field that changes no answer is ignored. A name that is in no table is ignored too. Such names are
listed in the answer's header `x-baton-ignored`, and sometimes in the log. Errors list such names if
they are similar to a known field.

`python -m router.gateway.requests.field_table docs/users/api.md` writes these tables into that
document.

Sources: OpenAI API reference; vLLM, vllm/entrypoints/openai/*/protocol.py; SGLang,
python/sglang/srt/entrypoints/openai/protocol.py; llm-d's endpoint picker for `slo_*`.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

BEGIN_MARK, END_MARK = "<!-- fields -->", "<!-- end -->"  # marks around the tables in a document

CHAT, COMPLETIONS, BOTH, EMBEDDINGS, ALL = "chat", "completions", "both", "embeddings", "all"
MESSAGES = "chat, embeddings"
PLACES = {  # by endpoint: words in the tables that include the endpoint
    CHAT: (CHAT, BOTH, MESSAGES, ALL),
    COMPLETIONS: (COMPLETIONS, BOTH, ALL),
    EMBEDDINGS: (EMBEDDINGS, MESSAGES, ALL),
}
OPENAI, VLLM, SGLANG, BATON = "OpenAI", "vLLM", "SGLang", "Baton"


class HonouredField(NamedTuple):
    """A field that Baton honours."""

    name: str
    endpoint: str
    origin: str
    meaning: str


class RefusedField(NamedTuple):
    """A field that Baton cannot honour; only its neutral values `harmless` are accepted."""

    name: str
    endpoint: str
    origin: str
    harmless: tuple[object, ...]
    reason: str


class HarmlessField(NamedTuple):
    """A field that changes no answer, so any value is accepted."""

    name: str
    origin: str
    reason: str


HONOURED = (
    HonouredField("model", ALL, OPENAI, "a name of `/v1/models`; absent: any version answers"),
    HonouredField(
        "messages", MESSAGES, OPENAI, "at most 4,096, of text; roles beyond OpenAI's pass"
    ),
    HonouredField("prompt", COMPLETIONS, OPENAI, "a text, token ids, or a list of either"),
    HonouredField("input", EMBEDDINGS, OPENAI, "a text, token ids, or a list of either"),
    HonouredField("encoding_format", EMBEDDINGS, OPENAI, "`float`, or `base64` of bytes"),
    HonouredField("embed_dtype", EMBEDDINGS, VLLM, "of the bytes: `float32` or `float16`"),
    HonouredField("endianness", EMBEDDINGS, VLLM, "byte order: `native`, `little` or `big`"),
    HonouredField("dimensions", EMBEDDINGS, OPENAI, "length, for models trained to be cut"),
    HonouredField("normalize", EMBEDDINGS, VLLM, "scaled to length 1; absent: as the model says"),
    HonouredField("use_activation", EMBEDDINGS, VLLM, "the newer name of `normalize`"),
    HonouredField("suffix", COMPLETIONS, OPENAI, "text behind the answer, for models trained so"),
    HonouredField(
        "max_tokens",
        BOTH,
        OPENAI,
        "longest answer; absent: the model's `max_new_tokens`, else 16 (completions) or the context"
        " (chat)",
    ),
    HonouredField("max_completion_tokens", CHAT, OPENAI, "the newer name of `max_tokens`"),
    HonouredField("min_tokens", BOTH, VLLM, "no end before this many tokens"),
    HonouredField("temperature", BOTH, OPENAI, "of sampling; 0 is greedy"),
    HonouredField("top_p", BOTH, OPENAI, "sampling from the likeliest tokens with this sum"),
    HonouredField("top_k", BOTH, VLLM, "sampling from this many tokens; 0 or -1: from all"),
    HonouredField("min_p", BOTH, VLLM, "no token below this share of the likeliest one"),
    HonouredField("seed", BOTH, OPENAI, "the same seed gives the same tokens"),
    HonouredField("n", BOTH, OPENAI, "number of choices"),
    HonouredField("best_of", COMPLETIONS, OPENAI, "choices made, of which the best `n` are shown"),
    HonouredField("use_beam_search", BOTH, VLLM, "the choices are the best of a beam search"),
    HonouredField("length_penalty", BOTH, VLLM, "exponent of the length, for beam search"),
    HonouredField("presence_penalty", BOTH, OPENAI, "subtracted for tokens of the answer"),
    HonouredField("frequency_penalty", BOTH, OPENAI, "the same, for each time"),
    HonouredField("repetition_penalty", BOTH, VLLM, "divides logits of tokens that were there"),
    HonouredField("logit_bias", BOTH, OPENAI, "added to logits, by token id"),
    HonouredField("allowed_token_ids", BOTH, VLLM, "no other token is sampled"),
    HonouredField("bad_words", BOTH, VLLM, "these never appear in the answer"),
    HonouredField("stop", BOTH, OPENAI, "strings that end the answer"),
    HonouredField("stop_token_ids", BOTH, VLLM, "tokens that end the answer"),
    HonouredField("ignore_eos", BOTH, VLLM, "the model's own end does not count"),
    HonouredField("include_stop_str_in_output", BOTH, VLLM, "the answer ends with its stop string"),
    HonouredField("skip_special_tokens", BOTH, VLLM, "`false` shows special tokens"),
    HonouredField("stream", BOTH, OPENAI, "server-sent events"),
    HonouredField("stream_options", BOTH, OPENAI, "`include_usage`, `continuous_usage_stats`"),
    HonouredField("logprobs", BOTH, OPENAI, "log-probabilities of tokens"),
    HonouredField("top_logprobs", CHAT, OPENAI, "number of likeliest tokens with the same"),
    HonouredField("prompt_logprobs", BOTH, VLLM, "the same of the prompt"),
    HonouredField("echo", BOTH, OPENAI, "the prompt, or the message to go on from, comes first"),
    HonouredField("return_token_ids", BOTH, VLLM, "`prompt_token_ids` and `token_ids`"),
    HonouredField("return_tokens_as_token_ids", BOTH, VLLM, "names tokens `token_id:N`"),
    HonouredField("add_special_tokens", ALL, VLLM, "add the tokenizer's special tokens"),
    HonouredField(
        "truncate_prompt_tokens", ALL, VLLM, "keeps this many; -1: as the context allows"
    ),
    HonouredField("truncation_side", ALL, VLLM, "the side that `truncate_prompt_tokens` cuts"),
    HonouredField("add_generation_prompt", MESSAGES, VLLM, "`false`: no begin of an answer"),
    HonouredField(
        "continue_final_message", MESSAGES, VLLM, "the answer goes on with the last message"
    ),
    HonouredField("chat_template_kwargs", MESSAGES, VLLM, "variables of the chat template"),
    HonouredField("documents", CHAT, VLLM, "for a chat template that knows them"),
    HonouredField("reasoning_effort", CHAT, OPENAI, "for a chat template that knows it"),
    HonouredField("include_reasoning", CHAT, VLLM, "`false` leaves reasoning out"),
    HonouredField("separate_reasoning", CHAT, SGLANG, "`false` leaves reasoning in the text"),
    HonouredField("tools", CHAT, OPENAI, "functions; only valid arguments are generated"),
    HonouredField("tool_choice", CHAT, OPENAI, "`none`, `auto`, `required` or one function"),
    HonouredField("parallel_tool_calls", CHAT, OPENAI, "`false`: at most one call"),
    HonouredField("response_format", BOTH, OPENAI, "`json_object`, `json_schema` and others"),
    HonouredField("structured_outputs", BOTH, VLLM, "one of json, regex, choice, grammar, …"),
    HonouredField("guided_json", BOTH, VLLM, "older name of `structured_outputs.json`"),
    HonouredField("guided_regex", BOTH, VLLM, "older name of `structured_outputs.regex`"),
    HonouredField("guided_choice", BOTH, VLLM, "older name of `structured_outputs.choice`"),
    HonouredField("guided_grammar", BOTH, VLLM, "older name of `structured_outputs.grammar`"),
    HonouredField("regex", BOTH, SGLANG, "the same as `structured_outputs.regex`"),
    HonouredField("ebnf", BOTH, SGLANG, "the same as `structured_outputs.grammar`"),
    HonouredField("json_schema", BOTH, SGLANG, "a schema, as an object or a text, or `$$ANY$$`"),
    HonouredField("user", ALL, OPENAI, "without keys, each has its own turn in the queue"),
    HonouredField("cache_salt", ALL, VLLM, "prefixes are shared only among equal salts"),
    HonouredField("priority", ALL, VLLM, "lower is served earlier, down to the operator's bound"),
    HonouredField("slo_ttft_ms", ALL, BATON, "bound on the first token"),
    HonouredField("slo_tpot_ms", BOTH, BATON, "bound on each further token"),
)

_SHOWN = {
    **{name: name for name in (CHAT, COMPLETIONS, EMBEDDINGS)},
    **dict.fromkeys((BOTH, MESSAGES), "other endpoints"),
}
_NOTHING: tuple[object, ...] = (False, "", [], {})  # neutral values
_NO_LORA = "adapters are not served"
_TEXT_ONLY = "only text is served"
_NO_HIDDEN = "hidden states are not given out"
_OPERATOR = "the operator chooses it"

REFUSED = (
    RefusedField("best_of", CHAT, OPENAI, (1,), "`n` gives several choices"),
    RefusedField("top_logprobs", COMPLETIONS, OPENAI, (0,), "`logprobs` is the number here"),
    RefusedField("tools", COMPLETIONS, OPENAI, ([],), "only chats have tools"),
    RefusedField("tool_choice", COMPLETIONS, OPENAI, ("none", "auto"), "only chats have tools"),
    RefusedField("functions", BOTH, OPENAI, ([],), "`tools` has replaced it"),
    RefusedField("function_call", BOTH, OPENAI, ("none", "auto"), "`tool_choice` has replaced it"),
    RefusedField("modalities", BOTH, OPENAI, (["text"],), _TEXT_ONLY),
    RefusedField("audio", BOTH, OPENAI, (), _TEXT_ONLY),
    RefusedField("web_search_options", BOTH, OPENAI, (), "no search is built in"),
    RefusedField("verbosity", CHAT, OPENAI, ("medium",), "no template knows it"),
    RefusedField("store", BOTH, OPENAI, (False,), "answers of these endpoints are not kept"),
    RefusedField("service_tier", BOTH, OPENAI, ("auto", "default"), "there is one tier"),
    RefusedField("moderation", CHAT, OPENAI, (), "nothing is moderated"),
    RefusedField("early_stopping", BOTH, VLLM, (False,), "a beam search ends by itself"),
    RefusedField("chat_template", BOTH, VLLM, (), _OPERATOR),
    RefusedField("media_io_kwargs", CHAT, VLLM, ({},), _TEXT_ONLY),
    RefusedField("mm_processor_kwargs", CHAT, VLLM, ({},), _TEXT_ONLY),
    RefusedField("prompt_embeds", BOTH, VLLM, ([],), "prompts are text or token ids"),
    RefusedField("kv_transfer_params", BOTH, VLLM, ({},), "the router moves KV by itself"),
    RefusedField("ec_transfer_params", BOTH, VLLM, ({},), _TEXT_ONLY),
    RefusedField("vllm_xargs", BOTH, VLLM, ({},), "they are for vLLM's plug-ins"),
    RefusedField("logits_processors", BOTH, VLLM, ([],), "clients' code is not run"),
    RefusedField("repetition_detection", BOTH, VLLM, (), "no answer is cut for repetition"),
    RefusedField("thinking_token_budget", BOTH, VLLM, (), "reasoning has no limit of its own"),
    RefusedField("logprob_token_ids", BOTH, VLLM, ([],), "the likeliest tokens are reported"),
    RefusedField("structural_tag", BOTH, VLLM, (), "a field of `structured_outputs`"),
    RefusedField("guided_whitespace_pattern", BOTH, VLLM, (), "blanks between parts are fixed"),
    RefusedField("watermarking", BOTH, VLLM, (False,), "answers carry no watermark"),
    RefusedField("return_prompt_text", CHAT, VLLM, (False,), "`return_token_ids` shows the prompt"),
    RefusedField("routed_experts_prompt_start", BOTH, VLLM, (0,), _NO_HIDDEN),
    RefusedField("extra_key", BOTH, SGLANG, (), "`cache_salt` keeps prefixes apart"),
    RefusedField("task", CHAT, SGLANG, (), "no template knows it"),
    RefusedField("reasoning", CHAT, SGLANG, ({},), "`reasoning_effort` does it"),
    RefusedField("images_config", BOTH, SGLANG, ({},), _TEXT_ONLY),
    RefusedField("return_meta_info", CHAT, SGLANG, (False,), "`usage` and headers have it"),
    RefusedField("return_prompt_token_ids", CHAT, SGLANG, (False,), "`return_token_ids` does it"),
    RefusedField("stop_regex", BOTH, SGLANG, ([], ""), "only strings and tokens end an answer"),
    RefusedField("no_stop_trim", BOTH, SGLANG, (False,), "`include_stop_str_in_output` does it"),
    RefusedField("lora_path", BOTH, SGLANG, (), _NO_LORA),
    RefusedField("session_params", BOTH, SGLANG, ({},), "conversations are in `messages`"),
    RefusedField("custom_logit_processor", BOTH, SGLANG, (), "clients' code is not run"),
    RefusedField("custom_params", BOTH, SGLANG, ({},), "they are for custom logit processors"),
    RefusedField("return_hidden_states", BOTH, SGLANG, (False,), _NO_HIDDEN),
    RefusedField("return_routed_experts", BOTH, SGLANG, (False,), _NO_HIDDEN),
    RefusedField("routed_experts_start_len", BOTH, SGLANG, (0,), _NO_HIDDEN),
    RefusedField("input_ids", BOTH, SGLANG, (), "`/v1/completions` takes token ids"),
    RefusedField("data_parallel_rank", BOTH, SGLANG, (), "the router chooses the worker"),
    RefusedField("routed_dp_rank", BOTH, SGLANG, (), "the router chooses the worker"),
    RefusedField("disagg_prefill_dp_rank", BOTH, SGLANG, (), "the router chooses the worker"),
    RefusedField("bootstrap_host", BOTH, SGLANG, (), "the router pairs workers"),
    RefusedField("bootstrap_port", BOTH, SGLANG, (), "the router pairs workers"),
    RefusedField("bootstrap_room", BOTH, SGLANG, (), "the router pairs workers"),
)

HARMLESS = (
    HarmlessField("metadata", OPENAI, "for the provider's own records"),
    HarmlessField("client_metadata", OPENAI, "for the provider's own records"),
    HarmlessField("safety_identifier", OPENAI, "names the end user"),
    HarmlessField("prompt_cache_key", OPENAI, "all prefixes are cached"),
    HarmlessField("prompt_cache_retention", OPENAI, "all prefixes are cached"),
    HarmlessField("prediction", OPENAI, "speeds an answer up and changes no token"),
    HarmlessField("request_id", VLLM, "the header `x-request-id` names a call"),
    HarmlessField("session_id", VLLM, "the header `x-baton-session` names a session"),
    HarmlessField("return_token_offsets", VLLM, "for a page that is not here"),
    HarmlessField("return_mm_kwargs", VLLM, "for a page that is not here"),
    HarmlessField("spaces_between_special_tokens", VLLM, "for tokenizers that are not served"),
    HarmlessField("detokenize", VLLM, "answers are text"),
    HarmlessField("stream_interval", VLLM, "tokens are sent as they come"),
    HarmlessField("guided_decoding_backend", VLLM, "there is one"),
    HarmlessField("structured_outputs_backend", VLLM, "there is one"),
    HarmlessField("return_cached_tokens_details", SGLANG, "`usage` has the count"),
    HarmlessField("stream_reasoning", SGLANG, "reasoning is sent as it comes"),
    HarmlessField("rid", SGLANG, "the header `x-request-id` names a call"),
    HarmlessField("ngram_corpus_id", SGLANG, "for drafts, which change no token"),
    HarmlessField("custom_labels", SGLANG, "for SGLang's metrics"),
    HarmlessField("max_dynamic_patch", SGLANG, "for images, which are refused"),
    HarmlessField("min_dynamic_patch", SGLANG, "for images, which are refused"),
    HarmlessField("use_audio_in_video", SGLANG, "for videos, which are refused"),
)


def refused_by(endpoint: str) -> Mapping[str, RefusedField]:
    """Returns the fields that an endpoint refuses, by name, including fields of other endpoints."""
    here = PLACES[endpoint]
    refused = {
        name: RefusedField(name, endpoint, origin, _NOTHING, f"it is a field of {_SHOWN[other]}")
        for name, other, origin, _ in HONOURED
        if other not in here
    }
    return refused | {each.name: each for each in REFUSED if each.endpoint in here}


def honoured_by(endpoint: str) -> tuple[str, ...]:
    """Returns the names of the fields that an endpoint honours."""
    return tuple(each.name for each in HONOURED if each.endpoint in PLACES[endpoint])


def known_by(endpoint: str) -> frozenset[str]:
    """Returns all names that an endpoint knows, including refused names."""
    harmless = (each.name for each in HARMLESS)
    return frozenset((*honoured_by(endpoint), *refused_by(endpoint), *harmless))


def tables() -> str:
    """Returns the Markdown of the tables of honoured, refused and harmless fields."""
    parts = [
        _table(
            ("field", "endpoint", "of", "meaning"),
            ((f"`{f.name}`", f.endpoint, f.origin, f.meaning) for f in HONOURED),
        ),
        "**Refused** with `unsupported_parameter`, unless the value asks for nothing:\n",
        _table(
            ("field", "endpoint", "of", "passes with", "why refused"),
            ((f"`{f.name}`", f.endpoint, f.origin, _shown(f.harmless), f.reason) for f in REFUSED),
        ),
        "**Passed over**, since no answer depends on it:\n",
        _table(("field", "of", "why"), ((f"`{f.name}`", f.origin, f.reason) for f in HARMLESS)),
    ]
    return "\n".join(parts)


def _shown(values: Sequence[object]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def fill_in(document: str) -> str:
    """Returns the document with the tables between the marks. Raises ValueError without marks."""
    before, begin, rest = document.partition(BEGIN_MARK)
    _, end, after = rest.partition(END_MARK)
    if not end:
        raise ValueError(f"there are no marks {BEGIN_MARK} and {END_MARK}")
    return f"{before}{begin}\n\n{tables()}\n{end}{after}"


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(fill_in(page.read_text(encoding="utf-8")), encoding="utf-8")
