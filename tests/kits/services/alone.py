"""The reference answers of requests, computed one prompt at a time in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.messages import Sampling, SeqId
from engine.worker.batch import BatchPlan, Row
from engine.worker.blocks import BlockId
from kvtransfer.messages import Identity
from kvtransfer.packing import pack, unpack
from kvtransfer.wire import agree

NUM_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Formats:
    """The KV formats of the prompt, the answer and the transfer."""

    prefill: KVFormat = KVFormat.FP32
    decode: KVFormat = KVFormat.FP32
    wire: KVFormat | None = None


def answers_alone(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    num_tokens: int,
    formats: Formats = Formats(),
    weights: WeightFormat = WeightFormat.FP32,
) -> list[list[int]]:
    """Returns the first `num_tokens` tokens of each answer of the bundled model.

    Like two workers, one runner computes the prompt, and a second one decodes from its KV.
    """
    from engine.model.runner import TorchRunner

    def opened(kv_format: KVFormat) -> TorchRunner:
        runner = TorchRunner(
            BUNDLED_MODEL, num_blocks=NUM_BLOCKS, kv_format=kv_format, weights=weights
        )
        runner.open()
        return runner

    source, sink = opened(formats.prefill), opened(formats.decode)
    answers = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        token_ids = [*prompt, _next_token(source, prompt, 0, sampling)]
        _hand_over(source, sink, formats.wire)
        while len(token_ids) < len(prompt) + num_tokens:
            token_ids.append(_next_token(sink, token_ids, len(token_ids) - 1, sampling))
        answers.append(token_ids[len(prompt) :])
    source.close()
    sink.close()
    return answers


def _next_token(runner, token_ids: Sequence[int], num_computed: int, sampling: Sampling) -> int:
    table = [BlockId(i) for i in range(runner.layout.num_blocks_for(len(token_ids)))]
    row = Row(SeqId("alone"), list(token_ids[num_computed:]), num_computed, table, sampling)
    return runner.run(BatchPlan([row])).tokens[0]


def _hand_over(source, sink, wire_format: KVFormat | None) -> None:
    """Copies every block of the source to the same block id of the sink."""
    one, other = (
        Identity(r.fingerprint, r.layout, kv_wire_dtype=wire_format) for r in (source, sink)
    )
    wire = agree(one, other)
    stored, wanted = (
        np.frombuffer(r.buffer, np.uint8).reshape(NUM_BLOCKS, -1) for r in (source, sink)
    )
    records = np.empty((NUM_BLOCKS, wire.record_bytes), np.uint8)
    pack(wire, stored, range(NUM_BLOCKS), records)
    unpack(wire, records, range(NUM_BLOCKS), wanted, [BlockId(i) for i in range(NUM_BLOCKS)])
