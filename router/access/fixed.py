"""The keys that the operator gives at the start (`--api-key`), known by hash. Pure."""

from collections import Counter
from collections.abc import Iterable

from engine.config import MAX_KEY_BYTES
from router.access.keys import Tenant, hash_of
from router.access.limits import KeyLimits


class FixedKeys:
    """Keys that do not change. They are the operator's own, so they may debug.

    Each shares cached prefixes only with itself, as keys of a file without a group do.
    """

    def __init__(self, hashes: Iterable[str]) -> None:
        self._tenants = {
            digest: Tenant(f"api-key-{number}", f"key:{digest}", KeyLimits(), may_debug=True)
            for number, digest in enumerate(hashes, start=1)
        }
        self.counters: Counter[str] = Counter()

    def find(self, key: bytes) -> Tenant | None:
        """The holder of a key; None for an unknown one."""
        return self._tenants.get(hash_of(key)) if len(key) <= MAX_KEY_BYTES else None
