"""A plan of `bench engine` with two kinds of peers."""

import sys
from pathlib import Path

from bench.engine.run import EngineStudy

PYTHON = Path(sys.executable)
PLAN = EngineStudy(
    threads=2,
    prefill_lens="512,2048",
    batches="8",
    contexts="2048,128",
    repeat=2,
    peer=[f"transformers={PYTHON}", f"llamacpp={PYTHON}"],
)
