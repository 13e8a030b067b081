"""Valid and invalid API keys, and the allowed contents of a keys file."""

import re
from datetime import timedelta
from hashlib import sha256

import msgspec
import pytest

from engine.config import MAX_KEY_BYTES
from router.access.keys import (
    FixedKeys,
    KeysError,
    KeyTable,
    decode_keys,
    encode_keys,
    hash_of,
    new_key,
    with_key,
    without_key,
)
from router.access.limits import KeyLimits
from tests.kits.router.access import CREATED, record

NOW_S = CREATED.timestamp()


def test_a_key_is_256_random_bits_and_is_kept_as_its_sha_256():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert re.fullmatch(r"baton-[A-Za-z0-9_-]{43}", key)
        kept = encode_keys([record(key, "ann")])
        assert sha256(key.encode()).hexdigest().encode() in kept
        assert key.encode() not in kept
        assert KeyTable(decode_keys(kept)).find(key.encode(), NOW_S).name == "ann"


def test_written_keys_are_read_back():
    records = (
        record("a", "ann", group="team", debug=True, expires=CREATED + timedelta(days=30)),
        record("b", "bob", limits=KeyLimits(2.5, 1000, 4)),
    )
    assert decode_keys(encode_keys(records)) == records


def test_a_key_opens_until_it_expires():
    table = KeyTable([record("a", "ann", expires=CREATED + timedelta(seconds=10))])
    assert table.find(b"a", NOW_S + 9.9).name == "ann"
    assert table.find(b"a", NOW_S + 10) is None


@pytest.mark.parametrize("key", [b"", b"A", b"a ", b"k\xe9y", b"\xff" * 8, b"a" * 2**20])
def test_other_headers_open_nothing(key):
    assert KeyTable([record("a", "ann")]).find(key, NOW_S) is None


def test_a_key_of_absurd_length_is_not_hashed():
    key = "a" * (MAX_KEY_BYTES + 1)
    assert KeyTable([record(key, "ann")]).find(key.encode(), NOW_S) is None


def test_only_keys_of_one_group_share():
    table = KeyTable(
        [
            record("a", "ann"),
            record("b", "bob"),
            record("c", "cid", group="team"),
            record("d", "dan", group="team"),
            record("e", "eve", group="ann"),
            record("f", "team"),
        ]
    )
    sharing = {key: table.find(key.encode(), NOW_S).sharing for key in "abcdef"}
    assert sharing["c"] == sharing["d"]
    assert len(set(sharing.values())) == 5
    assert "" not in sharing.values()  # "" is the salt of clients without keys


def test_a_reused_name_does_not_share_the_old_keys_prefixes():
    first, second = (KeyTable([record(key, "ann")]) for key in ("old", "new"))
    assert first.find(b"old", NOW_S).sharing != second.find(b"new", NOW_S).sharing


def test_keys_are_added_and_taken_away_by_name():
    ann, bob = record("a", "ann"), record("b", "bob")
    assert with_key([ann], bob) == (ann, bob)
    assert without_key([ann, bob], "ann") == (bob,)
    with pytest.raises(KeysError, match="'ann' is there twice"):
        with_key([ann], record("c", "ann"))
    with pytest.raises(KeysError, match="'bob' is there twice"):
        with_key([ann], record("a", "bob"))
    with pytest.raises(KeysError, match="no key is called 'cid'"):
        without_key([ann], "cid")


GOOD = msgspec.to_builtins(record("a", "ann"))


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "ann\n"},
        {"name": "x" * 65},
        {"hash": "00"},
        {"hash": "0" * 64 + "\n"},
        {"created": "2026-01-01T00:00:00"},
        {"expires": "soon"},
        {"group": ""},
        {"limits": {"max_streams": 0}},
        {"limits": {"max_stream": 1}},
        {"debug": "yes"},
        {"admin": True},
    ],
)
def test_a_keys_file_with_one_bad_entry_is_refused(change):
    data = msgspec.json.encode({"version": 1, "keys": [GOOD, {**GOOD, **change}]})
    with pytest.raises(KeysError):
        decode_keys(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"version": 2, "keys": []}', b'{"version":1}'],
)
def test_contents_that_are_not_a_keys_file_are_refused(data):
    with pytest.raises(KeysError):
        decode_keys(data)


FIXED = FixedKeys([hash_of(b"first"), hash_of(b"second")])


def test_each_key_has_its_own_tenant_who_may_debug():
    first, second = FIXED.find(b"first"), FIXED.find(b"second")
    assert (first.name, second.name) == ("api-key-1", "api-key-2")
    assert first.may_debug
    assert first.sharing != second.sharing


def test_other_keys_are_unknown():
    assert FIXED.find(b"third") is None
    assert FIXED.find(b"") is None
    assert FIXED.find(b"f" * (MAX_KEY_BYTES + 1)) is None
