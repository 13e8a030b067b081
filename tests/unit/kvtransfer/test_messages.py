"""Transfer messages are decoded unchanged; invalid messages are refused."""

import random

import msgspec
import pytest

from engine.errors import ProtocolError
from engine.layout import KVFormat, KVLayout, KVSection
from kvtransfer.messages import (
    TRANSFER_VERSION,
    Attach,
    AttachBody,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Hold,
    Identity,
    NixlOffer,
    Offers,
    Read,
    Ready,
    Release,
    ShmOffer,
    attach,
    decode_attach_body,
    decode_to_sink,
    decode_to_source,
    encode,
)

LAYOUT = KVLayout(16, KVFormat.BF16, (KVSection(2, 2, 64),))
IDENTITY = Identity("model 1", LAYOUT)
BODY = AttachBody("life of sink", "life of source", IDENTITY)

TO_SOURCE = [
    Hold("l", 3, 17),
    Read("l", [0, 2, 2**40]),
    Read("l", []),
    Release("l", 7),
]
SHM = ShmOffer("boot", 1, 2, 3, 4096)
NIXL = NixlOffer("agent", b"\x00\xff", 2**47, 4096, "VRAM", 1)
TO_SINK = [
    Attached("life", IDENTITY, 10, Offers()),
    Attached("life", IDENTITY, 10, Offers(SHM, NIXL)),
    AttachRefused("layout.block_size"),
    Ready("l", 2, [5, 6]),
    Ready("l", 2, [5, 6], 17),
    Data("l", [0, 1], 2**64 - 1),
    Ended("l", "revoked"),
    Ended("l", "released", 7),
]


@pytest.mark.parametrize("message", TO_SOURCE, ids=repr)
def test_a_sinks_message_arrives_as_it_was_sent(message):
    assert decode_to_source(encode(message)) == message


@pytest.mark.parametrize("message", TO_SINK, ids=repr)
def test_a_sources_message_arrives_as_it_was_sent(message):
    assert decode_to_sink(encode(message)) == message


def test_an_attach_carries_its_version_and_its_body():
    message = decode_to_source(encode(attach(BODY)))
    assert isinstance(message, Attach)
    assert message.version == TRANSFER_VERSION
    assert decode_attach_body(message.body) == BODY


def test_an_attach_of_another_version_is_decoded_up_to_its_version():
    later = {"type": "Attach", "version": 99, "body": ["of", {"another": "kind"}]}
    message = decode_to_source(msgspec.msgpack.encode(later))
    assert isinstance(message, Attach)
    assert message.version == 99
    with pytest.raises(ProtocolError):
        decode_attach_body(message.body)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x00", b"GET / HTTP/1.1\r\n", b"\x91" * 5000])
@pytest.mark.parametrize("decode", [decode_to_source, decode_to_sink])
def test_garbage_is_a_protocol_error(decode, frame):
    with pytest.raises(ProtocolError):
        decode(frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "Hold", "lease_id": "l"},
        {"type": "Hold", "lease_id": "l", "num_known": "three", "stamp": 0},
        {"type": "Hold", "lease_id": 3, "num_known": 3, "stamp": 0},
        {"type": "Hold", "lease_id": "l", "num_known": 3},
        {"type": "Read", "lease_id": "l", "indices": [1.5]},
        {"type": "Read", "lease_id": "l", "indices": None},
        {"type": "Release", "lease_id": "l"},
        {"type": "Ready", "lease_id": "l", "first": 0, "block_ids": []},
        {"type": "EventsMissed"},
        {"lease_id": "l", "num_known": 3, "stamp": 0},
    ],
)
def test_a_message_of_the_wrong_shape_is_a_protocol_error(fields):
    with pytest.raises(ProtocolError):
        decode_to_source(msgspec.msgpack.encode(fields))


def test_text_that_is_not_unicode_is_a_protocol_error():
    frame = encode(Hold("lease", 3, 0)).replace(b"lease", b"\xff\xfe\xfd\xfc\xfb", 1)
    with pytest.raises(ProtocolError):
        decode_to_source(frame)


def test_damaged_frames_raise_only_protocol_errors():
    rng = random.Random(1)
    frames = [encode(m) for m in (*TO_SOURCE, *TO_SINK, attach(BODY))]
    num_refused = 0
    for _ in range(1000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 3)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        for decode in (decode_to_source, decode_to_sink):
            try:
                message = decode(bytes(frame))
                if isinstance(message, Attach):
                    decode_attach_body(message.body)
            except ProtocolError:
                num_refused += 1
    assert num_refused > 500
