"""Reads samples of stores from a gateway's metrics."""

import re

import aiohttp

SAMPLE = re.compile(r"baton_store_(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(state|medium|reason)="(\w+)"')
STATES = ("free", "cached", "owned", "leased", "in_flight")


def store_samples(text: str) -> dict[str, float]:
    """Samples of all stores together, by `name` or `name:label`. Pure.

    So `slots:free` are free slots of memory, and `tier_reads_total:disk` the blocks read from disk.
    Of a tier's counts by reason, the sum over all reasons is returned.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is None:
            continue
        label = LABEL.search(sample[2])
        key = sample[1] if label is None else f"{sample[1]}:{label[2]}"
        found[key] = found.get(key, 0.0) + float(sample[3])
    return found


def num_slots(samples: dict[str, float]) -> float:
    """Returns the number of memory slots in any state."""
    return sum(samples.get(f"slots:{state}", 0.0) for state in STATES)


async def read_store_samples(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Requests a gateway's samples; empty if it does not answer, or knows no store."""
    try:
        async with session.get(f"{url}/metrics") as response:
            return store_samples(await response.text())
    except (aiohttp.ClientError, TimeoutError):
        return {}
