"""Coverage-guided fuzzing of `tests.fuzz.targets`: `python -m tests.fuzz.decoders -runs=200000`.

Arguments are libFuzzer's. A finding ends the run with a traceback, and its input is written to a
file; the file's name as the argument repeats it. Inputs start from valid messages. They are mutated
by `tests.fuzz.mutation`, and sometimes by libFuzzer.
"""

import logging
import random
import sys

import atheris

with atheris.instrument_imports(include=["engine", "kvtransfer"]):
    from tests.fuzz import targets

MAX_INPUT_BYTES = 2**20
BYTEWISE_SHARE = 0.2  # share of changes


def main(arguments: list[str]) -> None:
    """Does not return."""
    logging.disable(logging.CRITICAL)  # every input is a warning or two
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
