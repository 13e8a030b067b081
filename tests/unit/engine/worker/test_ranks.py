"""The part of the model that each rank has: stages, layers, slices and KV heads."""

from itertools import chain

import msgspec
import pytest

from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.worker.ranks import RankPlace, shards_of

WHOLE = KVLayout(16, KVFormat.BF16, (KVSection(5, 4, 64), KVSection(2, 4, 32)))


def ranks(tp, pp=1, ep=1):
    return [RankPlace(rank, tp, pp, ep) for rank in range(tp * pp)]


def test_rank_0_is_in_the_last_stage_where_the_logits_are():
    stages = [(r.stage, r.slice, r.is_first_stage, r.is_last_stage) for r in ranks(2, 3)]
    assert stages == [
        (2, 0, False, True),
        (2, 1, False, True),
        (1, 0, False, False),
        (1, 1, False, False),
        (0, 0, True, False),
        (0, 1, True, False),
    ]
    assert [list(ranks(2, 3)[0].ranks_of(stage)) for stage in range(3)] == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(("pp", "num_layers"), [(1, 3), (2, 3), (3, 3), (4, 33), (5, 64)])
def test_stages_have_all_layers_once_and_the_last_has_no_more_than_others(pp, num_layers):
    places = ranks(1, pp)
    own = [place.layers(num_layers) for place in reversed(places)]
    assert list(chain.from_iterable(own)) == list(range(num_layers))
    assert len(own[-1]) == min(map(len, own))
    assert max(map(len, own)) - len(own[-1]) <= 1


@pytest.mark.parametrize(("tp", "total"), [(1, 5), (2, 4), (2, 5), (4, 5), (4, 2), (8, 100)])
def test_slices_have_all_rows_once(tp, total):
    own = [place.share(total) for place in ranks(tp)]
    assert list(chain.from_iterable(own)) == list(range(total))
    assert max(map(len, own)) == -(-total // tp)


def test_with_fewer_kv_heads_than_ranks_neighbours_hold_the_same():
    assert [list(place.kv_heads(4)) for place in ranks(2)] == [[0, 1], [2, 3]]
    assert [list(place.kv_heads(2)) for place in ranks(4)] == [[0], [0], [1], [1]]
    with pytest.raises(ConfigError, match="3 KV heads cannot be shared by 2 ranks"):
        RankPlace(0, 2).kv_heads(3)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (8, 2)])
def test_shards_are_those_of_the_transfer(tp, pp):
    places = ranks(tp, pp)
    for place in places:
        heads = len(place.kv_heads(4))
        own = msgspec.structs.replace(
            WHOLE,
            sections=tuple(
                KVSection(len(place.layers(s.num_layers)), heads, s.head_dim)
                for s in WHOLE.sections
            ),
        )
        shards = shards_of(place, WHOLE, own)
        assert [WHOLE.of_rank(shard) for shard in shards][place.rank] == own
        for other, shard in zip(places, shards, strict=True):
            held = [list(shard.layers_of(WHOLE, 0)), list(shard.heads_of(WHOLE.sections[0]))]
            assert held == [list(other.layers(5)), list(other.kv_heads(4))]


def test_ranks_that_all_hold_all_heads_are_replicas():
    shards = shards_of(RankPlace(1, 2), WHOLE, WHOLE)
    assert {(shard.rank, shard.size) for shard in shards} == {(0, 1)}


def test_a_draft_whose_heads_are_shared_in_another_way_is_refused():
    own = msgspec.structs.replace(WHOLE, sections=(KVSection(5, 2, 64), KVSection(2, 4, 32)))
    with pytest.raises(ConfigError, match="its draft"):
        shards_of(RankPlace(0, 2), WHOLE, own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 0), "1 to 64 ranks"),
        ((0, 16, 8), "1 to 64 ranks"),
        ((2, 2), "rank 2 of 2"),
        ((0, 4, 1, 2), "ep is 2"),
    ],
)
def test_impossible_places_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        RankPlace(*fields)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="2 layers"):
        RankPlace(0, 1, 3).layers(2)
