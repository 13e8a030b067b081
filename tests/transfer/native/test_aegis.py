"""AEGIS in several lanes computes the vectors of RFC 10032, and rejects every changed message."""

import ctypes
from ctypes import CFUNCTYPE, addressof, byref, c_int, c_ulonglong, c_void_p, create_string_buffer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.native.library import library
from kvtransfer.native.copying import Cipher
from kvtransfer.native.stream import agreed_lanes

TAG_BYTES = 32
KEY = bytes(range(16))
NONCE = bytes(range(16, 32))
SEAL = CFUNCTYPE(
    *(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_ulonglong, c_void_p, c_ulonglong),
    *(c_void_p, c_void_p, c_void_p),
)
OPEN = CFUNCTYPE(
    *(c_int, c_void_p, c_void_p, c_void_p, c_ulonglong, c_void_p, c_void_p, c_ulonglong),
    *(c_void_p, c_void_p),
)
MESSAGE, BESIDE = bytes([4, 5, 6, 7] * 30), bytes([1, 2, 3, 4] * 2)
# from the RFC, by number of lanes: the tag of the empty message, then text and tag of the second
# vector
VECTORS = {
    2: (
        "b92c71fdbd358b8a4de70b27631ace90cffd9b9cfba82028412bac41b4f53759",
        "5795544301997f93621b278809d6331b3bfa6f18e90db12c4aa35965b5e98c5f"
        "c6fb4e54bcb6111842c20637252eff747cb3a8f85b37de80919a589fe0f24872"
        "bc926360696739e05520647e390989e1eb5fd42f99678a0276a498f8c454761c"
        "9d6aacb647ad56be62b29c22cd4b5761b38f43d5a5ee062f",
        "c471876f9b4978c44f2ae1ce770cdb11a094ee3feca64e7afcd48bfe52c60eca",
    ),
    4: (
        "a4b25437f4be93cfa856a2f27e4416b42cac79fd4698f2cdbe6af25673e10a68",
        "e836118562f4479c9d35c17356a833114c21f9aa39e4dda5e5c87f4152a00fce"
        "9a7c38f832eafe8b1c12f8a7cf12a81a1ad8a9c24ba9dedfbdaa586ffea67ddc"
        "801ea97d9ab4a872f42d0e352e2713dacd609f9442c17517c5a29daf3e2a3fac"
        "4ff6b1380c4e46df7b086af6ce6bc1ed594b8dd64aed2a7e",
        "69abf0f64a137dd6e122478d777e98bc422823006cf57f5ee822dd78397230b2",
    ),
}

pytestmark = pytest.mark.skipif(agreed_lanes() == 1, reason="the processor has no VAES")


def cipher():
    found = Cipher()
    assert library().baton_wide_cipher(byref(found)) == agreed_lanes()
    return SEAL(found.seal), OPEN(found.open)


def at(data, place=0):
    """Returns the address of a copy of some bytes, `place` bytes after a cache line's start, and
    the copy.
    """
    room = create_string_buffer(len(data) + 128)
    address = -(-addressof(room) // 64) * 64 + place
    ctypes.memmove(address, data, len(data))
    return address, room


def sealed(message, beside, place=0):
    seal, _ = cipher()
    out, tag = create_string_buffer(len(message) + 1), create_string_buffer(TAG_BYTES)
    ours = [at(data) for data in (beside, NONCE, KEY)]
    (beside_at, _), (nonce_at, _), (key_at, _) = ours
    message_at, message_room = at(message, place)
    sizes = len(message), len(beside)
    seal(
        addressof(out),
        addressof(tag),
        0,
        message_at,
        sizes[0],
        beside_at,
        sizes[1],
        0,
        nonce_at,
        key_at,
    )
    del message_room
    return out.raw[: len(message)], tag.raw


def opened(text, tag, beside, place=0):
    """Returns the decrypted message, or None if authentication fails. Then the output must be
    zeros.
    """
    _, unseal = cipher()
    ours = [at(data) for data in (text, tag, beside, NONCE, KEY)]
    text_at, tag_at, beside_at, nonce_at, key_at = (address for address, _ in ours)
    out, room = at(b"x" * len(text), place)
    failed = unseal(out, 0, text_at, len(text), tag_at, beside_at, len(beside), nonce_at, key_at)
    message = ctypes.string_at(out, len(text))
    del room, ours
    if not failed:
        return message
    assert message == bytes(len(text))
    return None


def test_vectors_of_the_rfc():
    of_nothing, text, tag = VECTORS[agreed_lanes()]
    assert sealed(b"", b"") == (b"", bytes.fromhex(of_nothing))
    assert sealed(MESSAGE, BESIDE) == (bytes.fromhex(text), bytes.fromhex(tag))


@given(st.binary(max_size=1000), st.binary(max_size=300), st.integers(0, 63))
def test_what_was_sealed_opens_anywhere(message, beside, place):
    text, tag = sealed(message, beside, place)
    assert opened(text, tag, beside) == message
    assert opened(text, tag, beside, place) == message


@given(st.data())
def test_any_changed_bit_opens_nothing(data):
    text, tag = sealed(MESSAGE * 3, BESIDE)
    parts = [bytearray(part) for part in (text, tag, BESIDE)]
    part = data.draw(st.sampled_from(parts))
    part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert opened(*map(bytes, parts)) is None
