"""Pools with different KV formats: every answer equals the reference in the same formats."""

import asyncio

import pytest

from engine.config import Transport, WeightFormat, WorkerConfig
from engine.layout import KVFormat
from engine.messages import Role, Sampling
from tests.kits.services.alone import Formats, answers_alone
from tests.kits.services.cluster import (
    Workers,
    ask_all,
    counted,
    prompts,
    request,
    router,
    until,
    workers,
)

pytestmark = pytest.mark.torch

PAIR = (Role.PREFILL, Role.DECODE)
NUM_TOKENS = 24
PROMPTS = prompts(10, vocab_size=4096, seed=11)
SAMPLINGS = [Sampling(temperature=0.0 if i % 2 else 0.8, seed=i) for i in range(len(PROMPTS))]
FP32_TO_INT8 = Formats(decode=KVFormat.INT8, wire=KVFormat.INT8)
# bf16 becomes fp32 without loss, so no option must allow the conversion
BF16_TO_FP32 = Formats(prefill=KVFormat.BF16)


def config(formats: Formats, transport: Transport) -> WorkerConfig:
    return WorkerConfig(
        kv_mib=64,
        chunk_tokens=48,
        weights=WeightFormat.FP32,
        kv_dtype=formats.prefill,
        decode_kv_dtype=formats.decode,
        kv_wire_dtype=formats.wire,
        kv_transport=transport,
    )


def serve(running: Workers, at_once: int) -> tuple[list[list[int]], str]:
    """Returns the answers to all prompts, and the fingerprint in the answers."""

    async def run() -> tuple[list[list[int]], str]:
        async with router(running) as r:
            requests = [
                request(f"r{i}", prompt, max_tokens=NUM_TOKENS, sampling=sampling)
                for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
            ]
            answers = await ask_all(r, requests, at_once)
            await until(
                lambda: counted(r, "pulls_done")["decode-1"] >= len(PROMPTS), "all was pulled"
            )
            return answers, r.fingerprint()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def wide() -> list[list[int]]:
    return answers_alone(PROMPTS, SAMPLINGS, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def narrowed() -> list[list[int]]:
    return answers_alone(PROMPTS, SAMPLINGS, num_tokens=NUM_TOKENS, formats=FP32_TO_INT8)


def test_int8_decode_workers_continue_from_fp32_prefill_workers(wide, narrowed):
    with workers(PAIR, config=config(FP32_TO_INT8, Transport.SHM)) as running:
        first, fingerprint = serve(running, at_once=1)
        together, _ = serve(running, at_once=16)
    assert first == narrowed
    assert together == narrowed
    assert [answer[0] for answer in first] == [answer[0] for answer in wide]
    assert fingerprint.endswith("-wire_int8-decode_int8-prefill_fp32")


def test_int8_decode_workers_differ_from_fp32(wide, narrowed):
    """If the answers did not differ, the tests above would prove nothing."""
    assert narrowed != wide


def test_fp32_decode_workers_continue_from_bf16_prefill_workers():
    with workers(PAIR, config=config(BF16_TO_FP32, Transport.AUTO)) as running:
        answers, fingerprint = serve(running, at_once=16)
    expected = answers_alone(PROMPTS, SAMPLINGS, num_tokens=NUM_TOKENS, formats=BF16_TO_FP32)
    assert answers == expected
    assert fingerprint.endswith("-decode_fp32-prefill_bf16")
