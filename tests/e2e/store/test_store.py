"""A KV store beside two workers: prefixes survive the workers, and no token changes.

Real processes are killed with -9 in turn: all workers, the store's process, its keeper. The answers
must equal the answers of a deployment without a store.
"""

import os
import random
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.admin.client import AdminClient, find_deployment
from tests.kits.services.processes import descendants_of, ended
from tests.kits.services.served import (
    HANDS_OVER,
    HTTP,
    Served,
    command_line,
    matching,
    metrics,
    poll_until,
    serve,
)

pytestmark = pytest.mark.torch

PROMPT_TOKENS = 600
BLOCK_TOKENS = 16
NEW_TOKENS = 12
SETTLE_S = 120.0
STORE_PROCESS = "deploy.store.main"


def prompts(num: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4096) for _ in range(PROMPT_TOKENS)] for _ in range(num)]


def ask(url: str, prompt: Sequence[int], seed: int | None = None) -> tuple[list[int], int]:
    """Returns the answer's tokens, and the number of cached tokens of the prompt."""
    body = {
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"temperature": 0.0} if seed is None else {"temperature": 0.9, "seed": seed}),
    }
    answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["token_ids"], cached


@contextmanager
def with_store(
    lent: Sequence[str], run_dir: Path, *arguments: str, **settings: str
) -> Iterator[Served]:
    environment = {f"BATON_STORE__{name.upper()}": value for name, value in settings.items()}
    with serve(
        "--launcher",
        "process",
        *arguments,
        command=lent,
        BATON_RUN_DIR=str(run_dir),
        **HANDS_OVER,
        **environment,
    ) as served:
        poll_until(lambda: has_joined(served), "the store has joined", SETTLE_S)
        yield served
        poll_until(lambda: not held_by_store(served), "the store holds nothing", SETTLE_S)


def samples(served: Served, name: str) -> dict[str, float]:
    return matching(name + r"\{", metrics(served.url))


def has_joined(served: Served) -> bool:
    return bool(samples(served, "baton_store_slots"))


def held_by_store(served: Served) -> dict[str, float]:
    """Returns the store's memory slots that a transfer reads or writes."""
    found = samples(served, "baton_store_slots")
    return {k: v for k, v in found.items() if v and not re.search('"(free|cached)"', k)}


def until_kept(served: Served, num_blocks: int, medium: str) -> None:
    """Waits until the store holds `num_blocks` on a medium."""

    def kept() -> float:
        found = samples(served, "baton_store_blocks")
        return sum(v for k, v in found.items() if f'medium="{medium}"' in k)

    poll_until(lambda: kept() >= num_blocks, lambda: f"{kept()} of {num_blocks}", SETTLE_S)


def admin(run_dir: Path) -> AdminClient:
    return AdminClient(*find_deployment(None, None, {"BATON_RUN_DIR": str(run_dir)}))


def kill_workers(run_dir: Path) -> None:
    """Kills all workers, and waits until new workers serve."""
    with admin(run_dir) as client:
        pids = [worker.pid for worker in client.pools().workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        def are_new() -> bool:
            pools = client.pools()
            return pools.settled and not {w.pid for w in pools.workers} & set(pids)

        poll_until(are_new, "other workers serve", SETTLE_S)


def store_pids() -> list[int]:
    there = descendants_of(os.getpid())
    return [pid for pid in there if STORE_PROCESS in command_line(pid)]


def kill_store(served: Served) -> None:
    """Kills the store's process, and waits until a new store has joined."""
    [pid] = store_pids()
    os.kill(pid, signal.SIGKILL)
    poll_until(lambda: store_pids() not in ([], [pid]), "it is started again", SETTLE_S)
    poll_until(lambda: has_joined(served), "it has joined", SETTLE_S)


def kill_keeper(served: Served) -> None:
    """Kills the store's parent, and waits until a new store has joined."""
    [child] = store_pids()
    keeper = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(keeper, signal.SIGKILL)
    assert ended(child), "its process ends too"
    poll_until(lambda: store_pids() not in ([], [child]), "the launcher starts it", SETTLE_S)
    poll_until(lambda: has_joined(served), "it has joined", SETTLE_S)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="module")
def expected(served) -> dict[str, list[list[int]]]:
    """Returns the answers of a deployment without a store."""
    greedy = [ask(served.url, prompt)[0] for prompt in prompts(4, 1)]
    sampled = [ask(served.url, prompt, seed=7)[0] for prompt in prompts(4, 1)]
    return {"greedy": greedy, "sampled": sampled}


def test_prefixes_outlive_workers_the_store_and_the_deployment(lent, run_dir, tmp_path, expected):
    disk = str(tmp_path / "kv")
    inputs = prompts(4, 1)
    whole = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = len(inputs) * PROMPT_TOKENS // BLOCK_TOKENS
    with with_store(lent, run_dir, memory_mib="64", disk=disk, disk_gib="1") as served:
        assert [ask(served.url, p)[0] for p in inputs] == expected["greedy"]
        until_kept(served, blocks, "host")
        until_kept(served, blocks, "disk")
        kill_workers(run_dir)
        answers = [ask(served.url, prompt) for prompt in inputs]
        assert [tokens for tokens, _ in answers] == expected["greedy"]
        assert [cached for _, cached in answers] == [whole] * len(inputs)
        kill_store(served)
        until_kept(served, blocks, "host")
        kill_workers(run_dir)
        answers = [ask(served.url, prompt, seed=7) for prompt in inputs]
        assert [tokens for tokens, _ in answers] == expected["sampled"]
        assert [cached for _, cached in answers] == [whole] * len(inputs)
        assert not samples(served, "baton_store_loaded_blocks_total")  # all blocks were in memory
    with with_store(lent, run_dir, memory_mib="64", disk=disk, disk_gib="1") as served:
        until_kept(served, blocks, "disk")
        answers = [ask(served.url, prompt) for prompt in inputs]
        assert [tokens for tokens, _ in answers] == expected["greedy"]
        # The first prefix is read from disk. Then the store knows whether disk or computing is
        # faster.
        assert answers[0][1] == whole

        def loaded() -> float:
            return sum(samples(served, "baton_store_loaded_blocks_total").values())

        poll_until(lambda: loaded() >= whole // BLOCK_TOKENS, "it was loaded", SETTLE_S)


@pytest.mark.long
def test_prefixes_outlive_workers_of_several_ranks(lent, run_dir):
    inputs = prompts(4, 1)
    whole = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    split = ("--tp", "2", "--decode-tp", "1", "--weights", "fp32")
    with with_store(lent, run_dir, *split, memory_mib="64") as served:
        before = [ask(served.url, prompt)[0] for prompt in inputs]
        until_kept(served, len(inputs) * PROMPT_TOKENS // BLOCK_TOKENS, "host")
        kill_workers(run_dir)
        answers = [ask(served.url, prompt) for prompt in inputs]
        assert [tokens for tokens, _ in answers] == before
        assert [cached for _, cached in answers] == [whole] * len(inputs)


def test_no_token_changes_while_store_and_keeper_are_killed_and_the_disk_damaged(
    lent, run_dir, tmp_path, expected
):
    """The store's memory is too small, so blocks are read from the disk, where bits have
    flipped."""
    disk = tmp_path / "kv"
    inputs = prompts(4, 1)
    failures: list[object] = []
    is_over = threading.Event()
    with with_store(lent, run_dir, memory_mib="6", disk=str(disk), disk_gib="1") as served:

        def run(number: int) -> None:
            rng = random.Random(number)
            while not is_over.is_set():
                which = rng.randrange(len(inputs))
                for name, seed in (("greedy", None), ("sampled", 7)):
                    tokens, _ = ask(served.url, inputs[which], seed)
                    if tokens != expected[name][which]:
                        failures.append((which, name, tokens))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                kill_store(served)
                damage(disk, random.Random(3))
                kill_workers(run_dir)
            kill_keeper(served)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(SETTLE_S)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)


def damage(disk: Path, rng: random.Random) -> None:
    """Flips some bits in all files of the disk tier."""
    for path in disk.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("r+b") as file:
                for _ in range(8):
                    place = rng.randrange(min(path.stat().st_size, 2**24))
                    file.seek(place)
                    byte = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def test_objects_outlive_memory_and_disk(lent, run_dir, tmp_path):
    [prompt] = prompts(1, 6)
    url = f"file://{tmp_path}/objects"
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    settings = {"memory_mib": "32", "objects": url, "salts": str(tmp_path / "salts")}
    with with_store(lent, run_dir, **settings) as served:
        tokens, _ = ask(served.url, prompt)
        until_kept(served, blocks, "object")
    with with_store(lent, run_dir, **settings) as served:
        until_kept(served, blocks, "object")
        again, cached = ask(served.url, prompt)
        assert again == tokens
        assert cached >= blocks // 2 * BLOCK_TOKENS
