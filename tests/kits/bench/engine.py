"""A plan of `bench engine` with two peers."""

import sys
from pathlib import Path

from bench.engine.plan import EnginePeer, EnginePlan
from engine.config import WeightFormat

PYTHON = Path(sys.executable)
PLAN = EnginePlan(
    shape="88m",
    checkpoint=None,
    weights=(WeightFormat.FP32, WeightFormat.INT8),
    kv_format=None,
    num_threads=2,
    prefill_lens=(512, 2048),
    batches=(8,),
    contexts=(2048, 128),
    num_repeats=2,
    peers=(
        EnginePeer("transformers", "transformers", "f32", PYTHON),
        EnginePeer("llamacpp_q8_0", "llamacpp", "q8_0", PYTHON),
    ),
)
