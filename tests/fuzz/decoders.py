"""Coverage-guided fuzzing of `tests.fuzz.targets`: `python -m tests.fuzz.decoders -runs=200000`.

The arguments are libFuzzer's. A finding ends the run with a traceback, and its input is written to
a file. To repeat the finding, pass the file's name as the argument. The search starts from valid
messages. `tests.fuzz.mutation` mutates the messages, and sometimes libFuzzer mutates their bytes.
"""

import logging
import random
import sys

import atheris

with atheris.instrument_imports(include=["engine", "kvtransfer"]):
    from tests.fuzz import targets

MAX_INPUT_BYTES = 2**20
BYTEWISE_SHARE = 0.2  # share of the mutations that libFuzzer makes, byte by byte


def main(arguments: list[str]) -> None:
    """Runs libFuzzer, which ends the process."""
    logging.disable(logging.CRITICAL)  # every input would log a warning or two
    world = targets.World()
    starts = targets.seeds(world)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < BYTEWISE_SHARE:
            return bytes(atheris.Mutate(data, max_size))
        changed = targets.another(data, rng, starts=starts)
        return changed if len(changed) <= max_size else data

    atheris.Setup(
        [*arguments, f"-max_len={MAX_INPUT_BYTES}"],
        lambda data: targets.run(world, data),
        custom_mutator=change,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
