"""The public tests of vLLM's and SGLang's OpenAI servers, and the corresponding tests of Baton.

A test of Baton that covers the same behaviour names the foreign tests with `like`. `LEFT_OUT` gives
the reason for each foreign test without a counterpart. `python -m tests.kits.tree.compat` prints
the table of docs/users/compatibility.md.

Sources: github.com/vllm-project/vllm, tests/entrypoints; github.com/sgl-project/sglang,
test/srt/openai_server; both read in November 2026. No code is copied.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[3]
TestT = TypeVar("TestT", bound=Callable[..., object])


def like(server: str, file: str, *names: str) -> Callable[[TestT], TestT]:
    """Marks a test that covers the same behaviour as these tests of another server."""
    assert server in ("vllm", "sglang")
    assert file.endswith(".py")
    assert names
    return lambda test: test


@dataclass(frozen=True, slots=True)
class Left:
    """Tests of another server without a counterpart in Baton."""

    server: str
    file: str
    names: tuple[str, ...]
    reason: str
    is_missed: bool = False  # true: the behaviour applies to Baton, but Baton differs


@dataclass(frozen=True, slots=True)
class Twin:
    """A test of Baton, and the other server's test to which it corresponds."""

    server: str
    file: str
    name: str
    here: str


def twins() -> Iterator[Twin]:
    """Returns all pairs, read from the sources of the tests."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "import like" not in source:
            continue
        body = ast.parse(source).body
        constants = dict(map(_assigned, (node for node in body if isinstance(node, ast.Assign))))
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                here = f"{path.relative_to(ROOT)}::{node.name}"
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "like":
                        server, file, *names = (_text(arg, constants) for arg in mark.args)
                        yield from (Twin(server, file, name, here) for name in names)


def _assigned(node: ast.Assign) -> tuple[str, ast.expr]:
    return getattr(node.targets[0], "id", ""), node.value


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """Returns a string literal, or the value of a constant of the module."""
    text = ast.literal_eval(constants[node.id] if isinstance(node, ast.Name) else node)
    assert isinstance(text, str)
    return text


def table() -> str:
    """Returns the Markdown of docs/users/compatibility.md below its heading."""
    found = list(twins())
    lines = []
    for server, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        passed = {(twin.file, twin.name) for twin in found if twin.server == server}
        left = [each for each in LEFT_OUT if each.server == server]
        missed = {(each.file, name) for each in left if each.is_missed for name in each.names}
        out = {(each.file, name) for each in left if not each.is_missed for name in each.names}
        applies = len(passed | missed)
        lines += [
            f"## {title}",
            "",
            f"Of {applies + len(out)} tests, {applies} apply. Of these {len(passed)} pass: "
            f"{len(passed) / applies:.0%}.",
            "",
            "| tests of | pass | do not apply | missed |",
            "|---|---|---|---|",
        ]
        for file in sorted({file for file, _ in passed | missed | out}):
            counts = [sum(one == file for one, _ in each) for each in (passed, out, missed)]
            lines.append(f"| `{file}` | " + " | ".join(map(str, counts)) + " |")
        lines += ["", "| left out | why |", "|---|---|"]
        for each in left:
            names = ", ".join(f"`{name}`" for name in each.names)
            why = f"**missed:** {each.reason}" if each.is_missed else each.reason
            lines.append(f"| {names} | {why} |")
        lines.append("")
    return "\n".join(lines)


_NATIVE = "asks SGLang's native `/generate`, not the OpenAI API"
_INTERNAL = "tests the inside of the other server, not its API"

LEFT_OUT: tuple[Left, ...] = (
    Left(
        "vllm",
        "entrypoints/openai/chat_completion/test_chat_echo.py",
        ("test_prompt_logprobs", "test_top_logprobs"),
        "asks for the log-probabilities of the whole vocabulary, which vLLM serves only with"
        " `--max-logprobs`; here `-1` is refused by name, as vLLM's default does",
    ),
    Left(
        "vllm",
        "entrypoints/openai/chat_completion/test_extra_content_fields.py",
        ("test_translategemma_extra_lang_code_fields",),
        "needs fields of content parts in the template; here parts become one text",
        is_missed=True,
    ),
    Left(
        "vllm",
        "entrypoints/openai/completion/test_prompt_validation.py",
        (
            "test_load_prompt_embeds",
            "test_disable_prompt_embeds",
            "test_inline_hidden_states_rejects_unsupported_http_shapes",
            "test_inline_hidden_states_rejects_multiple_completion_prompts",
            "test_inline_hidden_states_with_concurrent_streaming",
        ),
        "embeddings as prompts and hidden states in answers; both are refused by name",
    ),
    Left(
        "vllm",
        "entrypoints/openai/responses/test_simple.py",
        ("test_enable_response_messages",),
        "asks for vLLM's own `enable_response_messages`, which is refused by name",
    ),
    Left(
        "vllm",
        "entrypoints/serve/instrumentator/test_basic.py",
        (
            "test_health_check_engine_dead_error",
            "test_health_decode_ok_when_progressing",
            "test_health_decode_idle_when_no_running",
            "test_health_decode_idle_when_never_decoded",
            "test_health_decode_idle_when_long_prefill_in_flight",
            "test_health_decode_stalled_when_running_and_old_token",
            "test_health_decode_handles_client_failure",
            "test_stat_logger_manager_tracks_decode_liveness",
            "test_health_decode_503_when_engine_errored",
            "test_stat_logger_manager_carry_forward_across_recreate",
        ),
        _INTERNAL + "; `/ready` is what tells here",
    ),
    Left(
        "vllm",
        "entrypoints/serve/tokenize/test_tokenization.py",
        (
            "test_tokenizer_info_basic",
            "test_tokenizer_info_schema",
            "test_tokenizer_info_consistency_with_tokenize",
            "test_tokenizer_info_chat_template",
        ),
        "`/tokenizer_info` is off unless vLLM gets `--enable-tokenizer-info-endpoint`",
    ),
    Left(
        "vllm",
        "entrypoints/pooling/embed/test_online.py",
        ("test_base64_embed_dtype_and_endianness",),
        "asks for bf16 and fp8 as well; here bytes are fp32 or fp16",
        is_missed=True,
    ),
    Left(
        "vllm",
        "entrypoints/pooling/embed/test_online.py",
        ("test_bytes_embed_dtype_and_endianness", "test_bytes_only_embed_dtype_and_endianness"),
        "asks for vLLM's own binary answers, which are refused by name",
    ),
    Left(
        "vllm",
        "entrypoints/pooling/embed/test_online.py",
        ("test_pooling_embed", "test_pooling_token_embed", "test_pooling_not_supported"),
        "asks vLLM's own `/pooling`",
    ),
    Left(
        "sglang",
        "openai_server/basic/test_openai_server.py",
        ("TestOpenAIV1Rerank.test_rerank_single",),
        "reranking needs a cross-encoder, and Baton serves decoders",
    ),
    Left(
        "sglang",
        "openai_server/basic/test_openai_server.py",
        (
            "TestOpenAIServerv1Responses.test_regex",
            "TestOpenAIServerv1Responses.test_response_prefill",
            "TestOpenAIServerv1Responses.test_model_list",
        ),
        "asks chat completions once more, as tests above do",
    ),
    Left(
        "sglang",
        "openai_server/basic/test_protocol.py",
        (
            "test_model_card_serialization",
            "test_empty_model_list",
            "test_model_list_with_cards",
            "test_hidden_states_excluded_when_none",
            "test_hidden_states_included_when_not_none",
            "test_model_serialization_roundtrip",
        ),
        _INTERNAL,
    ),
    Left("sglang", "openai_server/features/test_cache_report.py", ("test_generate",), _NATIVE),
    Left(
        "sglang",
        "openai_server/features/test_usage_tokens.py",
        ("test_generate_api_non_streaming", "test_generate_api_streaming"),
        _NATIVE,
    ),
    Left(
        "sglang",
        "openai_server/features/test_usage_tokens.py",
        ("test_response_api_non_streaming", "test_response_api_streaming"),
        "is empty",
    ),
    Left(
        "sglang",
        "openai_server/function_call/test_parallel_tool_calls.py",
        ("test_parallel_tool_calls_auto",),
        "needs a model that chooses two tools by itself",
    ),
    Left(
        "sglang",
        "openai_server/function_call/test_tool_choice.py",
        ("test_error_handling_invalid_tool_choice",),
        "expects an answer although `tool_choice` names no tool; here, as in vLLM, that is a 400",
    ),
    Left(
        "sglang",
        "openai_server/validation/test_matched_stop.py",
        ("test_get_max_length",),
        _INTERNAL,
    ),
)


def main() -> None:
    """Writes the table to standard output."""
    sys.stdout.write(table())


if __name__ == "__main__":
    main()
