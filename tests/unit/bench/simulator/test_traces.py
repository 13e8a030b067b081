from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.goodput import infinite_cache_hits
from bench.simulator.traces import (
    Chat,
    Trace,
    TraceError,
    TraceRequest,
    prompt_tokens,
    read_trace,
    synthetic,
    with_ids,
    write_trace,
)

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 6000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,0
"""
FEW = settings(max_examples=25, deadline=None)


def written(tmp_path, text, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_mooncake_trace_begins_with_its_first_request(tmp_path):
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert trace.block_tokens == 512
    assert trace.requests == (
        TraceRequest(0.0, 1000, 5, (0, 1)),
        TraceRequest(3.0, 1030, 7, (0, 1, 2)),
    )


def test_azure_trace_has_lengths_without_shared_prefixes(tmp_path):
    trace = read_trace(written(tmp_path, AZURE, "azure.csv"))
    assert [(r.input_len, r.output_len) for r in trace.requests] == [(374, 44), (396, 1)]
    assert trace.requests[1].arrived_s == pytest.approx(4.25)
    first, second = with_ids(trace).requests
    assert not set(first.block_ids) & set(second.block_ids)


@FEW
@given(
    st.lists(
        st.builds(
            TraceRequest,
            st.floats(0, 1e6),
            st.integers(1, 20),
            st.integers(1, 9),
            st.just(()),
            st.integers(-3, 3),
        ),
        min_size=1,
    )
)
def test_written_trace_is_read_back(tmp_path_factory, requests):
    requests.sort(key=lambda r: r.arrived_s)
    start_s = requests[0].arrived_s
    trace = with_ids(Trace("t.jsonl", 8, tuple(requests)))
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(trace, path)
    read = read_trace(path)
    assert read.block_tokens == 8
    assert [r.block_ids for r in read.requests] == [r.block_ids for r in trace.requests]
    assert [r.priority for r in read.requests] == [r.priority for r in trace.requests]
    assert [r.arrived_s for r in read.requests] == [r.arrived_s - start_s for r in requests]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "empty"),
        ("hello\n", ":1: neither JSON nor the header"),
        (MOONCAKE + '{"timestamp": 1}\n', ":3: Object missing required field"),
        (MOONCAKE + "nonsense\n", ":3: "),
        (MOONCAKE.replace("[0, 1]", "[0]"), ":1: 1 block ids for 1000 tokens"),
        (MOONCAKE.replace('"output_length": 7', '"output_length": 0'), ":2: 1030 tokens in, 0 out"),
        (MOONCAKE.replace("6000", "-1"), ":2: a request cannot come at"),
        (MOONCAKE.replace("[0, 1]", "[0, -1]"), ":1: a block id is not between"),
        (AZURE + "yesterday,1,2\n", ":4: Invalid isoformat"),
        (AZURE + "2023-11-16 18:15:46,1\n", ":4: not enough values"),
        ('{"format": "baton-trace", "version": 2, "block_tokens": 4}\n', ":1: "),
        ('{"format": "baton-trace", "version": 1, "block_tokens": 4}\n', "no requests"),
    ],
)
def test_unreadable_line_is_named_with_its_reason(tmp_path, text, where):
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert where in str(error.value)


def test_tokens_are_equal_exactly_for_equal_ids(tmp_path):
    trace = read_trace(written(tmp_path, MOONCAKE))
    first, second = (prompt_tokens(r, 512) for r in trace.requests)
    assert len(first) == 1000
    assert first == second[:1000]
    assert set(second[1024:]) == {2}


def test_infinite_cache_hits_full_blocks_but_never_the_last_token():
    requests = (
        TraceRequest(0.0, 8, 1, (0, 1)),
        TraceRequest(1.0, 8, 1, (0, 1)),  # the second block contains the token to compute
        TraceRequest(2.0, 9, 1, (0, 1, 2)),
        TraceRequest(3.0, 3, 1, (0,)),
    )
    assert infinite_cache_hits(Trace("t", 4, requests)) == (4 + 8) / (8 + 8 + 9 + 3)


def test_scaling_speed_and_length_keeps_shared_prefixes():
    trace = Trace("t", 512, (TraceRequest(0.0, 1000, 9, (0, 1)), TraceRequest(8.0, 513, 1, (0, 3))))
    scaled = trace.sped_up(4.0).shortened(64)
    assert scaled.block_tokens == 8
    assert [r.arrived_s for r in scaled.requests] == [0.0, 2.0]
    assert [(r.input_len, r.output_len) for r in scaled.requests] == [(16, 1), (9, 1)]
    assert [len(r.block_ids) for r in scaled.requests] == [2, 2]


def test_synthetic_trace_depends_on_its_seed_and_shares_prefixes():
    chat = Chat(input_tokens=900, output_tokens=60)
    trace = synthetic(chat, 100, Random(3))
    assert trace == synthetic(chat, 100, Random(3))
    assert trace != synthetic(chat, 100, Random(4))
    assert len(trace.requests) == 100
    assert all(len(r.block_ids) == -(-r.input_len // 512) for r in trace.requests)
    assert infinite_cache_hits(trace) > 0.2
