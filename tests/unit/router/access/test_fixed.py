"""Keys that the operator gives at the start."""

from engine.config import MAX_KEY_BYTES
from router.access.fixed import FixedKeys
from router.access.keys import hash_of

KEYS = FixedKeys([hash_of(b"first"), hash_of(b"second")])


def test_each_key_has_its_own_tenant_who_may_debug():
    first, second = KEYS.find(b"first"), KEYS.find(b"second")
    assert (first.name, second.name) == ("api-key-1", "api-key-2")
    assert first.may_debug
    assert first.sharing != second.sharing


def test_other_keys_are_unknown():
    assert KEYS.find(b"third") is None
    assert KEYS.find(b"") is None
    assert KEYS.find(b"f" * (MAX_KEY_BYTES + 1)) is None
