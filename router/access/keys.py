"""API keys, stored by hash, each with a name, an expiry, a group and limits. Pure.

A key is 256 random bits, stored as its SHA-256. Such a key cannot be guessed, so a slow hash would
add no protection and cost the gateway time. The hash is looked up in a dictionary. The time of the
look-up depends on the hash of the client's text, which a client cannot steer towards a stored hash.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Annotated

import msgspec

from engine.config import MAX_KEY_BYTES
from engine.errors import ConfigError
from router.access.limits import KeyLimits, Tenant

KEY_PREFIX = "baton-"  # people and secret scanners recognise a leaked key by this prefix
KEY_BYTES = 32
MAX_KEYS = 10_000
_FILE_VERSION = 1

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
KeyHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The record of a key. Without a `group`, the key shares cached prefixes with no other key."""

    name: Name
    hash: KeyHash
    created: Instant
    expires: Instant | None = None
    group: Name | None = None
    limits: KeyLimits = KeyLimits()
    debug: bool = (
        False  # allows reading decisions, timelines and metrics, which reveal other tenants' load
    )


class KeysError(ConfigError):
    """The keys cannot be read, or cannot be changed as requested."""


class KeyTable:
    """All keys by hash."""

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        self._entries = {record.hash: (_tenant_of(record), _end_s(record)) for record in records}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes, unix_s: float) -> Tenant | None:
        """Returns the tenant of a key; None for an unknown or expired key."""
        if len(key) > MAX_KEY_BYTES:  # no key is this long, so the text is not hashed
            return None
        entry = self._entries.get(hash_of(key))
        if entry is None:
            return None
        tenant, end_s = entry
        return tenant if unix_s < end_s else None


def new_key() -> str:
    """Returns a random key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: bytes) -> str:
    """Returns the stored form of a key."""
    return sha256(key).hexdigest()


def with_key(records: Sequence[KeyRecord], record: KeyRecord) -> tuple[KeyRecord, ...]:
    """Returns a table with one additional key. Raises KeysError."""
    return _checked((*records, record))


def without_key(records: Sequence[KeyRecord], name: str) -> tuple[KeyRecord, ...]:
    """Returns a table without the key of this name. Raises KeysError."""
    kept = tuple(record for record in records if record.name != name)
    if len(kept) == len(records):
        raise KeysError(f"no key is called {name!r}")
    return kept


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: tuple[KeyRecord, ...]


def decode_keys(data: bytes) -> tuple[KeyRecord, ...]:
    """Decodes the contents of a keys file. Raises KeysError."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeysError(str(error)) from error
    if file.version != _FILE_VERSION:
        raise KeysError(f"its version is {file.version}, and only {_FILE_VERSION} is known")
    return _checked(file.keys)


def encode_keys(records: Sequence[KeyRecord]) -> bytes:
    """Encodes a keys file in a readable form."""
    return msgspec.json.format(msgspec.json.encode(_File(_FILE_VERSION, tuple(records)))) + b"\n"


def _checked(records: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
    if len(records) > MAX_KEYS:
        raise KeysError(f"there are more than {MAX_KEYS} keys")
    names: set[str] = set()
    hashes: set[str] = set()
    for record in records:
        if record.name in names or record.hash in hashes:
            raise KeysError(f"the key {record.name!r} is there twice")
        names.add(record.name)
        hashes.add(record.hash)
    return records


def _tenant_of(record: KeyRecord) -> Tenant:
    """Returns the tenant of a key. A key without a group shares prefixes under its own hash.

    The name of the key is not used for this, since another key may later get the same name.
    """
    sharing = f"key:{record.hash}" if record.group is None else f"group:{record.group}"
    return Tenant(record.name, sharing, record.limits, record.debug)


def _end_s(record: KeyRecord) -> float:
    return float("inf") if record.expires is None else record.expires.timestamp()


class FixedKeys:
    """A fixed set of keys of the operator, all with debug access.

    Each key shares cached prefixes only with itself, like a key without a group in a file.
    """

    def __init__(self, hashes: Iterable[str]) -> None:
        self._tenants = {
            digest: Tenant(f"api-key-{number}", f"key:{digest}", KeyLimits(), may_debug=True)
            for number, digest in enumerate(hashes, start=1)
        }
        self.counters: Counter[str] = Counter()

    def find(self, key: bytes) -> Tenant | None:
        """Returns the tenant of a key; None for an unknown key."""
        return self._tenants.get(hash_of(key)) if len(key) <= MAX_KEY_BYTES else None
