"""The usage of each API key: requests and tokens, for a bounded number of keys.

The name of a key is its label. The first `MAX_KEYS_SHOWN` used keys get their own series. All later
keys share the series `other`, so a file of 10,000 keys cannot flood Prometheus. Requests without a
key have an empty label, which Prometheus drops.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

MAX_KEYS_SHOWN = 200
OTHER = "other"  # a key with this name shares the series


class UsageOfKey:
    """The counts of one key."""

    __slots__ = ("num_cached_tokens", "num_generation_tokens", "num_prompt_tokens", "num_requests")

    def __init__(self) -> None:
        self.num_requests = 0  # valid requests
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0  # cached tokens in prompts
        self.num_generation_tokens = 0


class KeyUsage:
    """The counts of all keys of one process."""

    def __init__(self, max_shown: int = MAX_KEYS_SHOWN) -> None:
        self._max_shown = max_shown
        self._by_key: dict[str, UsageOfKey] = {}

    def of(self, key: str) -> UsageOfKey:
        """Returns the counts of a key, or the shared counts of all further keys."""
        use = self._by_key.get(key)
        if use is None:
            if len(self._by_key) >= self._max_shown:
                key = OTHER
            use = self._by_key.setdefault(key, UsageOfKey())
        return use

    def families(self) -> Iterator[Metric]:
        """Yields the counts of all keys."""
        requests = CounterMetricFamily(
            "baton_key_requests", "Valid requests of an API key", labels=["key"]
        )
        tokens = CounterMetricFamily(
            "baton_key_tokens",
            "Tokens of an API key, by kind: prompt or generation",
            labels=["key", "kind"],
        )
        cached = CounterMetricFamily(
            "baton_key_cached_tokens", "Tokens of prompts found in caches", labels=["key"]
        )
        for key, use in self._by_key.items():
            requests.add_metric([key], use.num_requests)
            tokens.add_metric([key, "prompt"], use.num_prompt_tokens)
            tokens.add_metric([key, "generation"], use.num_generation_tokens)
            cached.add_metric([key], use.num_cached_tokens)
        yield from (requests, tokens, cached)
