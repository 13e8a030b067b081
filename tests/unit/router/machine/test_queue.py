"""The order of the queue: returned requests, then by priority, then fairly among tenants."""

import random
from types import SimpleNamespace

import pytest

from router.cluster.learning import AnswerLengths
from router.machine.flight import Flight, Stamps
from router.machine.queue import FairQueue, Waiting
from tests.kits.router.scripted_workers import request


@pytest.fixture
def queue():
    waiting = FairQueue(quantum=10.0)
    yield waiting
    waiting.validate()


def put(queue, name, *, tenant="", priority=0, work=5.0, rank=0.0):
    queue.put(name, priority=priority, tenant=tenant, work=work, rank=rank)


def drain(queue, number=None) -> list[str]:
    names = []
    while (head := queue.head()) is not None and (number is None or len(names) < number):
        names.append(head)
        queue.remove(head)
        queue.validate()
    return names


def test_of_one_tenant_requests_are_served_in_order_of_arrival(queue):
    for name in "abc":
        put(queue, name, work=100.0)
    assert drain(queue) == ["a", "b", "c"]
    assert len(queue) == 0


def test_within_a_tenant_the_lowest_rank_comes_first(queue):
    for name, rank in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        put(queue, name, rank=rank)
    queue.rank("c", 1.5)
    queue.rank("gone", 0.0)
    assert drain(queue) == ["a", "c", "b"]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_change_often_leave_the_order_true(seed):
    rng = random.Random(seed)
    queue, ranks = FairQueue(quantum=10.0), {}
    for number in range(500):
        if ranks and rng.random() < 0.6:
            name = rng.choice(sorted(ranks))
            ranks[name] = (rng.random(), ranks[name][1])
            queue.rank(name, ranks[name][0])
        elif ranks and rng.random() < 0.4:
            assert queue.head() == min(ranks, key=ranks.__getitem__)
            del ranks[queue.head()]
            queue.remove(queue.head())
        else:
            ranks[str(number)] = (rng.random(), number)
            put(queue, str(number), rank=ranks[str(number)][0])
        queue.validate()
    assert drain(queue) == sorted(ranks, key=ranks.__getitem__)


def test_a_prompt_whose_time_was_overrated_is_not_passed_for_long():
    """Other prompts may overtake a 10 s prompt for 20 s. Then its predicted time falls to 1 s."""
    speed = SimpleNamespace(token_s=10.0)
    speed.any_prefill_s = lambda num_tokens: num_tokens * speed.token_s
    waiting = Waiting(speed, AnswerLengths(), lambda _: None, patience=2.0)
    waiting.put(flight("early", arrived_s=0.0))
    speed.token_s = 1.0
    for name, arrived_s in (("soon", 1.0), ("later", 2.0)):
        waiting.put(flight(name, arrived_s))
    assert drain(waiting.queue) == ["early", "soon", "later"]


def flight(name, arrived_s):
    """Returns a flight with a prompt of one token."""
    return Flight(request(name, (1,)), Stamps(arrived_s), arrived_s)


def test_turns_of_tenants_go_before_ranks(queue):
    for number in range(3):
        put(queue, f"short-{number}", tenant="short", work=10.0, rank=0.0)
        put(queue, f"long-{number}", tenant="long", work=10.0, rank=9.0)
    assert [name.split("-")[0] for name in drain(queue)] == ["short", "long"] * 3


def test_a_lower_number_is_served_earlier(queue):
    put(queue, "later", priority=1)
    put(queue, "normal")
    put(queue, "urgent", priority=-1)
    assert drain(queue) == ["urgent", "normal", "later"]


def test_returned_requests_go_first_latest_before_earlier(queue):
    put(queue, "urgent", priority=-9)
    queue.put_back("second")
    queue.put_back("first")
    assert drain(queue) == ["first", "second", "urgent"]


def test_head_stays_until_taken_or_overtaken(queue):
    put(queue, "a", tenant="x", work=25.0)
    put(queue, "b", tenant="y", work=25.0)
    head = queue.head()
    assert all(queue.head() == head for _ in range(5))
    put(queue, "c", tenant="z", work=1.0)
    assert queue.head() == head
    put(queue, "d", priority=-1)
    assert queue.head() == "d"


def test_tenants_take_turns_however_many_requests_one_has(queue):
    for number in range(6):
        put(queue, f"many-{number}", tenant="many", work=10.0)
    put(queue, "few-0", tenant="few", work=10.0)
    put(queue, "few-1", tenant="few", work=10.0)
    assert drain(queue, 4) == ["many-0", "few-0", "many-1", "few-1"]


def test_tenant_with_long_requests_gets_equal_work_less_often(queue):
    for number in range(30):
        put(queue, f"long-{number}", tenant="long", work=40.0)
        for part in range(4):
            put(queue, f"short-{number}-{part}", tenant="short", work=10.0)
    served = drain(queue, 60)
    work = {"long": 0.0, "short": 0.0}
    for name in served:
        tenant = name.split("-")[0]
        work[tenant] += 40.0 if tenant == "long" else 10.0
    assert abs(work["long"] - work["short"]) <= 50.0


def test_tenant_without_requests_keeps_no_credit(queue):
    put(queue, "a", tenant="x", work=1.0)
    put(queue, "b", tenant="y", work=1.0)
    queue.discard(queue.head())
    assert drain(queue) == ["b"]
    put(queue, "c", tenant="x", work=30.0)
    put(queue, "d", tenant="y", work=10.0)
    assert drain(queue) == ["d", "c"]


def test_absent_requests_cannot_be_taken_nor_present_ones_put_twice(queue):
    put(queue, "a")
    assert "a" in queue
    assert "b" not in queue
    with pytest.raises(AssertionError):
        put(queue, "a", priority=3)
    with pytest.raises(AssertionError):
        queue.put_back("a")
    with pytest.raises(KeyError):
        queue.remove("b")


@pytest.mark.parametrize("seed", range(10))
def test_shares_are_even_over_any_time_in_which_all_have_something_waiting(seed):
    rng = random.Random(seed)
    queue = FairQueue(quantum=10.0)
    served = dict.fromkeys("abc", 0.0)
    work = {}

    def arrive(tenant):
        name = f"{tenant}{len(work)}"
        work[name] = rng.choice([1.0, 7.0, 30.0] if tenant == "a" else [2.0, 5.0])
        queue.put(name, priority=0, tenant=tenant, work=work[name])

    for tenant in "abc":
        for _ in range(3):
            arrive(tenant)
    for _ in range(2000):
        head = queue.head()
        queue.remove(head)
        served[head[0]] += work[head]
        arrive(head[0])
        if rng.random() < 0.1:
            victim = rng.choice(list(queue))
            queue.discard(victim)
            arrive(victim[0])
        queue.validate()
    # The bound of deficit round robin: one quantum plus the largest request.
    assert max(served.values()) - min(served.values()) <= 2 * (10.0 + 30.0)
