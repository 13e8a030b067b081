"""Every message is decoded unchanged, and invalid bytes raise a typed error."""

import math
import random
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ProtocolError
from engine.layout import MAX_RANKS, KVFormat, KVLayout, KVSection, LayerRange, Shard
from engine.messages import (
    HASH_BYTES,
    MAX_ENDPOINT_LEN,
    MAX_HASHES,
    MAX_HINT_ID_LEN,
    MAX_KEEP_S,
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    FinishReason,
    FirstToken,
    Generate,
    GivenBack,
    Hello,
    LeaseRef,
    Limits,
    OfferBlocks,
    OfferPrefix,
    PinBlocks,
    Prefetch,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RankAddress,
    Role,
    Sampling,
    SessionEnd,
    SessionUse,
    ToGateway,
    Tokens,
    ToWorker,
    TransferAddress,
    Welcome,
    decode_to_gateway,
    decode_to_worker,
    encode_frame,
)
from engine.net.trust import SALT_BYTES

DECODERS = {decode_to_worker: get_args(ToWorker), decode_to_gateway: get_args(ToGateway)}
FEW = settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
SAMPLES = [  # valid frames, from which broken frames are made
    Prefill("a.0", [0, 7, 2**32 - 1], Sampling(seed=2**64 - 1), Limits(9, 4, (1, 2))),
    Decode(
        "a.0",
        [1, 2],
        Sampling(),
        Limits(9),
        LeaseRef("a.0", TransferAddress("w", "1", "tcp://w"), 1),
    ),
    FirstToken("a.0", 7),
    OfferPrefix("a.0", [3, 4], bytes(range(SALT_BYTES))),
    OfferBlocks("a.0", [bytes(16), bytes(range(16))]),
    Prefetch([bytes(range(16))]),
    Cancel("a.0"),
    SessionUse("key", "session", [bytes(HASH_BYTES)], 60.0),
]


def values(kind: Any) -> "st.SearchStrategy[Any]":
    """Draws any value that a field of this type may have."""
    if hasattr(kind, "__supertype__"):  # a NewType
        return values(kind.__supertype__)
    match get_origin(kind) or kind:
        case origin if origin is Annotated:
            return bounded(*get_args(kind))
        case origin if origin in (UnionType, Union):  # Union, if a part of it is annotated
            return st.one_of([values(part) for part in get_args(kind)])
        case origin if origin is tuple and Ellipsis not in get_args(kind):
            return st.tuples(*map(values, get_args(kind)))
        case origin if origin in (list, tuple):
            return st.lists(values(get_args(kind)[0]), max_size=3).map(origin)
        case origin if origin is dict:
            return st.dictionaries(*map(values, get_args(kind)), max_size=2)
        case origin if issubclass(origin, Enum):
            return st.sampled_from(origin)
        case origin if origin is KVLayout:
            return st.builds(origin, values(int), values(KVFormat), values(tuple[KVSection, ...]))
        case origin if origin is KVSection:  # int4 needs an even head_dim
            even = st.integers(0, 2**32).map(lambda n: 2 * n)
            return st.builds(origin, values(int), values(int), even)
        case origin if origin is LayerRange:
            return st.builds(origin, st.integers(0, 2**32), st.integers(0, 2**32))
        case origin if origin is TransferAddress:
            fields = {f.name: values(f.type) for f in msgspec.structs.fields(origin)}
            return st.builds(dict, **fields).filter(has_distinct_ranks).map(lambda f: origin(**f))
        case origin if origin is Shard:
            layers = values(tuple[LayerRange, ...])
            return st.builds(origin, st.integers(0, 8), st.integers(9, MAX_RANKS), layers)
        case origin if issubclass(origin, msgspec.Struct):
            fields = {f.name: values(f.type) for f in msgspec.structs.fields(origin)}
            return st.builds(origin, **fields)
    return {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=6),
        bytes: st.binary(max_size=6),
        NoneType: st.none(),
    }[kind]


def has_distinct_ranks(address: dict[str, Any]) -> bool:
    endpoints = [address["address"], *(rank.address for rank in address["others"])]
    return len(set(endpoints)) == len(endpoints)


def bounded(kind: Any, *bounds: Any) -> "st.SearchStrategy[Any]":
    """Draws any value within a type's bounds: an id, a prompt, a salt, hashes and so on."""
    (meta,) = (each for each in bounds if isinstance(each, msgspec.Meta))
    sizes = {"min_size": meta.min_length or 0, "max_size": min(meta.max_length or 4, 64)}
    if kind is int:
        return st.integers(meta.ge, meta.lt - 1)
    if kind is float:
        return st.floats(meta.gt, meta.le, exclude_min=True)
    if kind in (bytes, str):
        return (st.binary if kind is bytes else st.text)(**sizes)
    origin = get_origin(kind)
    assert origin in (list, tuple)
    return st.lists(values(get_args(kind)[0]), min_size=sizes["min_size"], max_size=4).map(origin)


@pytest.mark.parametrize(
    ("decode", "kind"),
    [(decode, kind) for decode, kinds in DECODERS.items() for kind in kinds],
    ids=lambda value: value.__name__,
)
def test_every_message_survives_the_wire(decode, kind):
    @FEW
    @given(values(kind))
    def survives(message):
        assert decode(encode_frame([message])) == [message]

    survives()


def test_a_frame_holds_messages_of_many_kinds_in_order():
    messages = [PrefillStarted("a", 0, None), Tokens("b", [1, 2]), GivenBack("c", "why")]
    assert decode_to_gateway(encode_frame(messages)) == messages
    assert decode_to_worker(encode_frame(SAMPLES)) == SAMPLES


def test_a_frame_may_be_empty():
    assert decode_to_worker(encode_frame([])) == decode_to_gateway(encode_frame([])) == []


def test_every_message_names_its_kind():
    for kinds in DECODERS.values():
        for kind in kinds:
            assert kind.__struct_config__.tag == kind.__name__


def test_fields_that_a_newer_peer_adds_are_ignored():
    frame = msgspec.msgpack.encode([{"type": "Cancel", "seq_id": "a", "why": "new"}])
    assert decode_to_worker(frame) == [Cancel("a")]


# ---------------------------------------------------------------- invalid messages


@pytest.mark.parametrize("decode", DECODERS, ids=lambda value: value.__name__)
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x90\x90",
        b"\x80",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"not a frame",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode([{}]),
        msgspec.msgpack.encode([{"seq_id": "a"}]),
        msgspec.msgpack.encode([{"type": "Sing", "seq_id": "a"}]),
        msgspec.msgpack.encode([{"type": 1}]),
        b"\x91\x81\xa4type\xa2\xff\xfe",
        b"\x91\x81\xa2\xff\xfe\xa0",
    ],
    ids=lambda frame: repr(frame[:12]),
)
def test_invalid_bytes_are_a_protocol_error(decode, frame):
    with pytest.raises(ProtocolError):
        decode(frame)


def test_a_message_of_the_other_direction_is_a_protocol_error():
    with pytest.raises(ProtocolError, match=r"from a gateway: .*Tokens"):
        decode_to_worker(encode_frame([Tokens("a", [1])]))
    with pytest.raises(ProtocolError, match=r"from a worker: .*Cancel"):
        decode_to_gateway(encode_frame([Cancel("a")]))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Cancel"},
        {"type": "Cancel", "seq_id": 7},
        {"type": "FirstToken", "seq_id": "a", "token": "7"},
        {"type": "FirstToken", "seq_id": "a", "token": 7.5},
        {"type": "Hello", "version": None, "gateway_id": "g"},
    ],
    ids=str,
)
def test_a_missing_field_or_one_of_the_wrong_type_is_a_protocol_error(message):
    with pytest.raises(ProtocolError):
        decode_to_worker(msgspec.msgpack.encode([message]))


def test_text_that_is_not_utf8_is_a_protocol_error():
    frame = encode_frame([Cancel("secret")]).replace(b"secret", b"\xff\xfe\xfd\xfc\xfb\xfa")
    with pytest.raises(ProtocolError):
        decode_to_worker(frame)


@pytest.mark.parametrize("kind", [Prefill, Generate])
@pytest.mark.parametrize("token_ids", [[], [-1], [2**32], [1, 2, -5]], ids=str)
def test_a_prompt_that_could_not_be_computed_is_a_protocol_error(kind, token_ids):
    frame = encode_frame([kind("a", token_ids, Sampling(), Limits(9))])
    with pytest.raises(ProtocolError, match="token_ids"):
        decode_to_worker(frame)


@pytest.mark.parametrize(
    "message",
    [
        SessionUse("", "s", []),
        SessionUse("k", "s" * (MAX_HINT_ID_LEN + 1), []),
        SessionUse("k", "s", [bytes(HASH_BYTES - 1)]),
        SessionUse("k", "s", [bytes(HASH_BYTES)] * (MAX_HASHES + 1)),
        *(SessionUse("k", "s", [], s) for s in (0.0, -1.0, 2 * MAX_KEEP_S, math.nan, math.inf)),
        SessionEnd("k" * (MAX_HINT_ID_LEN + 1), "s"),
        PinBlocks("k", [b""]),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_a_hint_outside_its_bounds_is_a_protocol_error(message):
    with pytest.raises(ProtocolError):
        decode_to_worker(encode_frame([message]))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_frame_that_is_cut_off_is_a_protocol_error(message):
    frame = encode_frame([message])
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode_to_worker(frame[:end])


def test_bytes_behind_a_frame_are_a_protocol_error():
    with pytest.raises(ProtocolError):
        decode_to_worker(encode_frame(SAMPLES) + b"\x90")


def test_a_damaged_frame_is_read_or_refused_and_nothing_else():
    rng = random.Random(0)
    frame = encode_frame(SAMPLES)
    for _ in range(500):
        damaged = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            decode_to_worker(bytes(damaged))
        except ProtocolError:
            continue


# ---------------------------------------------------------------- meanings of fields


@pytest.mark.parametrize(
    ("role", "prefills", "decodes"),
    [(Role.PREFILL, True, False), (Role.DECODE, False, True), (Role.MIXED, True, True)],
)
def test_a_role_defines_the_accepted_work(role, prefills, decodes):
    assert (role.prefills, role.decodes) == (prefills, decodes)


def test_sampling_and_limits_travel_without_field_names():
    frame = encode_frame([Prefill("a", [1], Sampling(seed=3), Limits(9))])
    assert b"seed" not in frame
    assert b"max_len" not in frame


def test_a_finish_travels_as_its_name():
    (done,) = decode_to_gateway(encode_frame([PrefillDone("a", 7, FinishReason.STOP)]))
    assert done.finish is FinishReason.STOP


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        Hello(1, "g").version = 2


@pytest.mark.parametrize(
    ("role", "says", "generates"),
    [
        (Role.PREFILL, {}, False),
        (Role.DECODE, {}, False),
        (Role.DECODE, {"stretch": 4.0}, True),
        (Role.PREFILL, {"stretch": 4.0}, True),
        (Role.DRAINED, {"stretch": 4.0}, False),
        (Role.MIXED, {}, True),
    ],
)
def test_a_welcome_tells_if_the_worker_generates(role, says, generates):
    layout = KVLayout(4, KVFormat.FP32, (KVSection(1, 1, 2),))
    fields = (PROTOCOL_VERSION, "w", "life", role, "model", layout, 10, 4)
    sent = {"type": "Welcome", **dict(zip(Welcome.__struct_fields__, fields, strict=False)), **says}
    (received,) = decode_to_gateway(msgspec.msgpack.encode([sent]))
    assert received == Welcome(*fields, **says)
    assert received.generates is generates


def test_the_address_of_a_worker_of_one_rank_has_no_more_fields_than_it_needs():
    address = TransferAddress("w", "1", "tcp://w")
    assert msgspec.to_builtins(address) == {
        "worker_id": "w",
        "incarnation": "1",
        "address": "tcp://w",
    }
    assert address.ranks == (address,)


def test_an_address_names_each_rank_with_its_share():
    second = RankAddress("tcp://b", Shard(1, 2))
    address = TransferAddress("w", "1", "tcp://a", Shard(0, 2), (second,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=TransferAddress) == address
    assert address.ranks == (
        TransferAddress("w", "1", "tcp://a", Shard(0, 2)),
        TransferAddress("w", "1", "tcp://b", Shard(1, 2)),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "x" * (MAX_ENDPOINT_LEN + 1)},
        {"others": [{"address": str(i)} for i in range(MAX_RANKS)]},
        {"others": [{"address": "x"}, {"address": "x"}]},
        {"others": [{"address": "tcp://w"}]},
        {"others": [{"address": "x", "shard": {"rank": 2, "size": 2}}]},
        {"shard": {"layers": [[0, -1]]}},
    ],
)
def test_an_impossible_address_is_refused(fields):
    sent = {"worker_id": "w", "incarnation": "1", "address": "tcp://w"} | fields
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(sent, TransferAddress)
