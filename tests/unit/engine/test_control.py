"""Messages between controller and gateways are decoded unchanged; others are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import control
from engine.config import WorkerConfig
from engine.control import (
    ControllerHello,
    Members,
    Pools,
    by_number,
    by_role,
    decode_from_controller,
    decode_from_gateway,
    encode_control,
    with_role,
)
from engine.demand import DecodeCost, Observation
from engine.errors import ConfigError, ProtocolError
from engine.layout import KVFormat
from engine.messages import Role

ints = st.integers(0, 2**63 - 1)
texts = st.text(max_size=8)
seconds = st.floats(allow_nan=False)
pools = st.builds(Pools, ints, ints, ints)
configs = st.sampled_from([WorkerConfig(), WorkerConfig(kv_dtype=KVFormat.INT8, threads=2)])
versions = st.builds(control.Version, texts, texts, texts, configs, pools, ints, st.booleans())
intents = st.builds(
    control.Intent,
    st.lists(versions, min_size=1, max_size=2).map(tuple),
    st.sampled_from(control.PlannerMode),
    st.lists(texts, max_size=2).map(tuple),
    st.none()
    | st.builds(
        control.Rollout,
        texts,
        pools,
        st.lists(versions, max_size=2).map(tuple),
        st.lists(texts, max_size=2).map(tuple),
    ),
)
workers = st.lists(st.builds(control.Member, texts, texts, texts, ints), max_size=3).map(tuple)
members = st.builds(Members, ints, workers, intents)
requests = st.builds(
    control.RequestInfo,
    request_id=texts,
    state=st.sampled_from(control.RequestState),
    age_s=seconds,
    prompt_len=ints,
    answer_len=ints,
    prefill=st.none() | texts,
    decode=st.none() | texts,
    num_attempts=ints,
    version=texts,
)
reports = st.builds(control.VersionReport, st.none() | texts, ints, texts)
costs = st.builds(DecodeCost, seconds, seconds, seconds)
seen = st.builds(Observation, seconds, num_decoding=ints, decode_cost=st.none() | costs)

to_gateway = st.one_of(
    st.builds(ControllerHello, ints), members, st.builds(control.ListRequests, ints, ints)
)
to_controller = st.one_of(
    st.builds(control.GatewayWelcome, ints, texts, st.none() | members),
    st.builds(control.ControllerRefused, texts),
    st.builds(
        control.GatewayReport,
        st.none() | texts,
        ints,
        ints,
        ints,
        ints,
        seconds,
        st.dictionaries(texts, seen, max_size=2),
        st.dictionaries(texts, reports, max_size=2),
    ),
    st.builds(control.RequestList, ints, ints, st.lists(requests, max_size=2)),
)


@given(st.lists(to_gateway, max_size=3))
def test_messages_of_a_controller_arrive(messages):
    assert decode_from_controller(encode_control(messages)) == messages


@given(st.lists(to_controller, max_size=3))
def test_messages_of_a_gateway_arrive(messages):
    assert decode_from_gateway(encode_control(messages)) == messages


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_a_typed_error(frame):
    for decode in (decode_from_controller, decode_from_gateway):
        try:
            decode(frame)
        except ProtocolError:
            continue


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\x81\xa4type\xa3Foo", b"\x91\xa1\xff"])
def test_no_message_no_frame(frame):
    with pytest.raises(ProtocolError, match="bad frame from a controller"):
        decode_from_controller(frame)
    with pytest.raises(ProtocolError, match="bad frame from a gateway"):
        decode_from_gateway(frame)


def test_one_side_does_not_take_what_it_says_itself():
    hello = encode_control([ControllerHello(1)])
    with pytest.raises(ProtocolError):
        decode_from_gateway(hello)


def test_pools_count_by_role_and_move_a_worker():
    pools = Pools(2, 1, 0)
    assert pools.total == 3
    assert [pools.of(role) for role in Role] == [2, 1, 0, 0, 0]
    assert pools.moved(Role.PREFILL, Role.DECODE) == Pools(1, 2)
    assert pools.moved(Role.PREFILL, Role.DRAINED) == Pools(1, 1)
    assert pools.moved(Role.DRAINED, Role.MIXED) == Pools(2, 1, 1)


@pytest.mark.parametrize("pools", [Pools(0, 1), Pools(1, 0), Pools(0, 0), Pools(2, -1, 1)])
def test_pools_that_could_serve_nothing_are_refused(pools):
    with pytest.raises(ConfigError):
        pools.check()


def test_members_of_two_versions_differ():
    first = Members(1, (), control.Intent())
    assert first != Members(2, (), control.Intent())


def test_names_are_sorted_by_number_and_workers_by_role_before():
    names = ["worker-10", "worker-2", "gateway", "prefill-3", "worker-x", "worker-1"]
    assert sorted(names, key=by_number) == [
        *("gateway", "prefill-3", "worker-1", "worker-2", "worker-10", "worker-x")
    ]
    workers = [(None, "a"), (Role.DRAINED, "b-1"), (Role.DECODE, "c-0"), (Role.PREFILL, "d-9")]
    assert sorted(workers, key=lambda each: by_role(*each)) == workers[::-1]


@given(st.lists(texts | st.integers(0, 5000).map(lambda n: "worker-" + n * "1"), max_size=5))
def test_any_names_can_be_sorted(names):
    backwards = names[::-1]
    assert sorted(names, key=by_number) == sorted(backwards, key=by_number)


def test_a_role_stands_beside_a_name():
    assert with_role("worker-0", Role.DECODE) == "worker-0 (decode)"
    assert with_role("gateway", None) == "gateway"
