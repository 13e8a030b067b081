"""A manifest is decoded unchanged, or refused with a reason."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.native.copying import checksum
from kvtransfer.store.objects.manifest import (
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTES,
    SEGMENT_BLOCKS,
    ManifestBlock,
    ManifestFault,
    SegmentTerms,
    decode_manifest,
    describe_blocks,
    encode_manifest,
)

BLOCK_BYTES = 24
IDENTITY = b"i" * 16

digests = st.binary(min_size=16, max_size=16)
pairs = st.lists(
    st.tuples(digests, st.none() | digests),
    min_size=1,
    max_size=SEGMENT_BLOCKS,
    unique_by=lambda pair: pair[0],
)


def terms(num_blocks, **changes):
    own = SegmentTerms("a-b-c", IDENTITY, BLOCK_BYTES, num_blocks * BLOCK_BYTES)
    return msgspec.structs.replace(own, **changes)


def payload_of(num_blocks):
    return bytes(i % 251 for i in range(num_blocks * BLOCK_BYTES))


def framed(body, magic=b"BatonKVM", version=MANIFEST_VERSION):
    return struct.pack("<8sIQ", magic, version, checksum(body)) + body


def described(num_blocks):
    names = [(bytes([i]) * 16, None) for i in range(num_blocks)]
    return describe_blocks(names, payload_of(num_blocks), BLOCK_BYTES)


def manifest_of(num_blocks=3):
    return encode_manifest(terms(num_blocks), described(num_blocks))


def changed(**changes):
    """Returns a manifest with changes to its last block."""
    *others, last = described(3)
    return encode_manifest(terms(3), [*others, msgspec.structs.replace(last, **changes)])


@given(pairs)
def test_a_manifest_is_read_as_it_was_written(named):
    payload = payload_of(len(named))
    blocks = describe_blocks(named, payload, BLOCK_BYTES)
    expected = terms(len(named))
    assert decode_manifest(encode_manifest(expected, blocks), expected) == blocks
    assert [(block.block_hash, block.parent) for block in blocks] == named
    assert all(checksum(payload[one.offset : one.end]) == one.checksum for one in blocks)


def test_the_largest_manifest_is_within_the_bound():
    big = 2**63
    blocks = [
        ManifestBlock(bytes([i]) * 16, bytes([i]) * 16, big, big, big)
        for i in range(SEGMENT_BLOCKS)
    ]
    largest = encode_manifest(SegmentTerms("n" * 64, IDENTITY, big, big), blocks)
    assert len(largest) <= MAX_MANIFEST_BYTES


@given(st.data())
def test_no_flipped_bit_is_accepted(data):
    manifest = bytearray(manifest_of())
    bit = data.draw(st.integers(0, 8 * len(manifest) - 1))
    manifest[bit // 8] ^= 1 << bit % 8
    assert isinstance(decode_manifest(bytes(manifest), terms(3)), ManifestFault)


@given(st.integers(0, len(manifest_of()) - 1))
def test_no_truncated_manifest_is_accepted(length):
    assert isinstance(decode_manifest(manifest_of()[:length], terms(3)), ManifestFault)


@given(st.binary(max_size=300))
def test_hostile_bytes_are_refused_even_with_a_right_checksum(body):
    assert isinstance(decode_manifest(body, terms(3)), ManifestFault)
    assert isinstance(decode_manifest(framed(body), terms(3)), ManifestFault)


@given(st.data())
def test_what_is_accepted_lies_in_the_segment_whatever_the_body_says(data):
    body = bytearray(manifest_of()[20:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    found = decode_manifest(framed(bytes(body)), terms(3))
    if not isinstance(found, ManifestFault):
        assert all(one.length == BLOCK_BYTES and one.end <= 3 * BLOCK_BYTES for one in found)
        assert len({one.block_hash for one in found}) == len(found)


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        (b"", ManifestFault.SIZE),
        (manifest_of() + bytes(MAX_MANIFEST_BYTES), ManifestFault.SIZE),
        (framed(manifest_of()[20:], magic=b"OtherKVM"), ManifestFault.MAGIC),
        (framed(manifest_of()[20:], version=MANIFEST_VERSION + 1), ManifestFault.VERSION),
        (manifest_of() + b"x", ManifestFault.CHECKSUM),
        (framed(manifest_of()[20:] + b"x"), ManifestFault.FORMAT),
        (framed(b"\x91" * 4000), ManifestFault.FORMAT),
        (framed(b"\xdd\xff\xff\xff\xff" + bytes(60)), ManifestFault.FORMAT),
        (encode_manifest(terms(3), []), ManifestFault.FORMAT),
        (
            encode_manifest(terms(3), described(1) * (SEGMENT_BLOCKS + 1)),
            ManifestFault.FORMAT,
        ),
        (changed(offset=2 * BLOCK_BYTES + 1), ManifestFault.FORMAT),
        (changed(offset=2**63), ManifestFault.FORMAT),
        (changed(length=BLOCK_BYTES - 1), ManifestFault.FORMAT),
        (changed(block_hash=bytes(16)), ManifestFault.FORMAT),  # the hash of the first block
        (changed(block_hash=bytes(15)), ManifestFault.FORMAT),
        (changed(parent=bytes(17)), ManifestFault.FORMAT),
    ],
)
def test_each_fault_has_its_reason(manifest, fault):
    assert decode_manifest(manifest, terms(3)) is fault


@pytest.mark.parametrize(
    "other",
    [
        {"name": "a-b-d"},
        {"identity": b"j" * 16},
        {"block_bytes": BLOCK_BYTES // 2},
        {"segment_bytes": 3 * BLOCK_BYTES + 1},
    ],
)
def test_a_manifest_of_another_segment_is_foreign(other):
    assert decode_manifest(manifest_of(), terms(3, **other)) is ManifestFault.FOREIGN
