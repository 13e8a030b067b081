"""Tenants that wait get equal shares, whatever they put in."""

from hypothesis import given
from hypothesis import strategies as st

from router.inbox.turns import MAX_REMEMBERED, TenantTurns

PUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60)


def drained(turns: TenantTurns) -> list:
    found = []
    while (item := turns.take()) is not None:
        found.append(item)
    return found


def filled(puts) -> TenantTurns:
    turns: TenantTurns = TenantTurns()
    for number, (tenant, weight) in enumerate(puts):
        turns.put(tenant, (tenant, weight, number), weight)
    return turns


@given(PUTS)
def test_each_item_is_taken_once_and_in_the_order_of_its_tenant(puts):
    taken = drained(filled(puts))
    assert sorted(item[2] for item in taken) == list(range(len(puts)))
    for tenant in "abc":
        numbers = [number for name, _, number in taken if name == tenant]
        assert numbers == sorted(numbers)


@given(PUTS)
def test_while_two_tenants_wait_neither_gets_an_item_more_than_the_other(puts):
    turns, left = filled(puts), [tenant for tenant, _ in puts]
    got = dict.fromkeys("abc", 0)
    while left:
        tenant, weight, _ = turns.take()
        left.remove(tenant)
        got[tenant] += weight
        waiting = [got[each] for each in "abc" if each in left]
        if waiting:
            assert max(waiting) - min(waiting) <= 50


def test_equal_items_are_taken_by_turns():
    turns = filled([("a", 1), ("a", 1), ("a", 1), ("b", 1), ("b", 1)])
    assert [item[0] for item in drained(turns)] == ["a", "b", "a", "b", "a"]


def test_a_tenant_that_comes_later_does_not_wait_behind_a_flood_and_is_owed_nothing():
    turns = filled([("a", 10)] * 50)
    for _ in range(20):
        turns.take()
    for number in range(5):
        turns.put("b", ("b", 10, number), 10)
    first = [turns.take()[0] for _ in range(8)]
    assert first.count("b") == 4


def test_a_tenant_that_may_have_nothing_now_keeps_its_place():
    turns = filled([("a", 1), ("b", 1)])
    assert turns.take(lambda tenant: tenant == "b")[0] == "b"
    assert turns.take(lambda tenant: tenant == "b") is None
    assert turns.take()[0] == "a"


def test_tenants_that_are_gone_are_forgotten():
    turns = filled([("a", 1)] * 1000)
    for number in range(5 * MAX_REMEMBERED):
        turns.put(number, number)
        turns.take()
    assert len(turns._got) <= 2 * (len(turns._queues) + MAX_REMEMBERED) + 1
    drained(turns)
    assert not turns._got
