"""Headers of slots on disk: a written header is accepted, and every other header is refused."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.store.disk.format import (
    EMPTY,
    HEADER,
    HEADER_BYTES,
    SEQUENCE_END,
    DiskGeometry,
    HeaderVerdict,
    claimed,
    disk_checksum,
    judge,
    merged,
    sealed_header,
    unsealed_header,
)
from tests.kits.twins.checksums import slow_header_checksums

GEOMETRY = DiskGeometry(b"model and layout", block_bytes=5000, slab_slots=4, max_slots=64)
HASH, PARENT = b"a block's hash..", b"its parent's one"
hashes = st.binary(min_size=16, max_size=16)


def header(slot=0, block_hash=HASH, *, parent=None, sequence=1, geometry=GEOMETRY):
    unsealed = unsealed_header(
        geometry, slot, block_hash=block_hash, parent=parent, sequence=sequence
    )
    return sealed_header(unsealed, payload_checksum=77)


def as_headers(*entries):
    return np.frombuffer(b"".join(entries), HEADER)


def verdicts(*entries, first_slot=0, geometry=GEOMETRY):
    found = judge(as_headers(*entries), first_slot, geometry, slow_header_checksums)
    return [HeaderVerdict(one) for one in found]


def bits(entry):
    return np.unpackbits(np.frombuffer(entry, np.uint8))


@given(st.integers(0, 63), hashes, st.none() | hashes, st.integers(0, SEQUENCE_END - 1))
def test_a_header_is_read_as_it_was_written(slot, block_hash, parent, sequence):
    entry = header(slot, block_hash, parent=parent, sequence=sequence)
    assert len(entry) == HEADER_BYTES
    assert verdicts(entry, first_slot=slot) == [HeaderVerdict.FINE]
    found = claimed(as_headers(entry))
    assert found.slot_by_hash() == {block_hash: slot}
    assert found.parent_by_hash() == {block_hash: parent}
    assert found.sequences.tolist() == [sequence]
    assert found.checksums.tolist() == [77]


def test_no_flipped_bit_goes_unnoticed():
    for parent in (None, PARENT):
        flipped = bits(header(parent=parent)) ^ np.eye(8 * HEADER_BYTES, dtype=np.uint8)
        found = judge(
            as_headers(np.packbits(flipped, axis=1).tobytes()), 0, GEOMETRY, slow_header_checksums
        )
        assert HeaderVerdict.FINE not in found.tolist()


@given(st.sets(st.integers(0, 8 * HEADER_BYTES - 1), min_size=1))
def test_no_set_of_flipped_bits_goes_unnoticed(places):
    flipped = bits(header(parent=PARENT))
    flipped[list(places)] ^= 1
    assert verdicts(np.packbits(flipped).tobytes()) != [HeaderVerdict.FINE]


@pytest.mark.parametrize("before", [EMPTY, header(block_hash=PARENT, sequence=9)])
def test_a_torn_header_is_not_believed(before):
    new = header()
    for num_bytes in range(1, HEADER_BYTES):
        torn = new[:num_bytes] + before[num_bytes:]
        if torn not in (new, before):
            assert verdicts(torn) in (
                [HeaderVerdict.NO_HEADER],
                [HeaderVerdict.OTHER_VERSION],
                [HeaderVerdict.DAMAGED],
            )


def test_entries_are_refused_for_a_reason():
    entries = {
        HeaderVerdict.FINE: header(0),
        HeaderVerdict.EMPTY: EMPTY,
        HeaderVerdict.NO_HEADER: b"?" + header(2)[1:],
        HeaderVerdict.OTHER_VERSION: header(3)[:8] + b"\2" + header(3)[9:],
        HeaderVerdict.DAMAGED: header(4)[:-1] + b"?",
        HeaderVerdict.OTHER_IDENTITY: header(5, geometry=DiskGeometry(b"?" * 16, 5000, 4, 64)),
        HeaderVerdict.OTHER_GEOMETRY: header(5),
        HeaderVerdict.NO_SEQUENCE: header(7, sequence=SEQUENCE_END),
    }
    assert verdicts(*entries.values()) == list(entries)


@pytest.mark.parametrize(
    "other",
    [
        header(1),
        header(geometry=DiskGeometry(GEOMETRY.identity, 4999, 4, 64)),
        header(geometry=DiskGeometry(GEOMETRY.identity, 5000, 8, 64)),
    ],
    ids=["another slot", "other payloads", "other slabs"],
)
def test_a_header_of_another_place_is_refused(other):
    assert verdicts(other) == [HeaderVerdict.OTHER_GEOMETRY]


@given(st.lists(st.binary(max_size=HEADER_BYTES), max_size=8))
def test_arbitrary_bytes_are_judged_and_never_believed(pieces):
    entries = [piece.ljust(HEADER_BYTES, b"\0") for piece in pieces]
    assert HeaderVerdict.FINE not in verdicts(*entries)


@given(st.lists(st.integers(0, 5), max_size=12), st.randoms(use_true_random=False))
def test_of_blocks_with_the_same_hash_the_latest_counts(numbers, rng):
    sequences = list(range(1, len(numbers) + 1))
    rng.shuffle(sequences)
    entries = [
        header(slot, bytes([number]) * 16, sequence=sequence)
        for slot, (number, sequence) in enumerate(zip(numbers, sequences, strict=True))
    ]
    cut = len(entries) // 2
    found = merged([claimed(as_headers(*entries[:cut])), claimed(as_headers(*entries[cut:]))])
    newest = {}
    for sequence, slot in sorted(zip(sequences, range(len(numbers)), strict=True)):
        newest.pop(numbers[slot], None)
        newest[numbers[slot]] = (sequence, slot)
    assert found.sequences.tolist() == [sequence for sequence, _ in newest.values()]
    assert found.slots.tolist() == [slot for _, slot in newest.values()]
    assert list(found.slot_by_hash()) == [bytes([number]) * 16 for number in newest]


def test_hashes_that_begin_alike_are_not_taken_for_duplicates():
    alike = [header(0, b"12345678abcdefgh"), header(1, b"12345678ABCDEFGH", sequence=2)]
    assert merged([claimed(as_headers(*alike))]).slots.tolist() == [0, 1]


@given(st.binary(max_size=300))
def test_short_contents_are_hashed_with_zeros_behind_them(content):
    padded = content if len(content) > 240 else content.ljust(256, b"\0")
    assert disk_checksum(content) == xxhash.xxh3_64_intdigest(padded)


def test_slots_are_as_far_apart_as_direct_input_and_output_needs():
    strides = [DiskGeometry(HASH, size, 1, 1).stride_bytes for size in (1, 4096, 4097)]
    assert strides == [4096, 4096, 8192]
