"""Steps that are counted come to what the same steps come to when each of them is run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.hold import HOLD_S
from decode.scheduler import DecodeScheduler
from engine.messages import (
    Cancel,
    Decode,
    FinishReason,
    FirstToken,
    GatewayId,
    GivenBack,
    LeaseRef,
    Limits,
    Sampling,
    SeqId,
    TransferAddress,
)
from engine.messages import Tokens as TokensMessage
from engine.worker.batch import RowResult
from engine.worker.blocks import BlockPool
from engine.worker.events import Adopted, Emit, FromGateway, PullDone, StartPull
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence

BLOCK_SIZE = 4
GATEWAY = GatewayId("g")


def following(seq, number):
    """Tokens that differ from one sequence to another, by position."""
    first = 1000 * (1 + seq.sampling.seed) + len(seq.token_ids)
    return range(first, first + number)


class Side:
    """One scheduler with its own pool, and what it has told."""

    def __init__(self, num_blocks):
        self.pool = BlockPool(num_blocks, keeps_news=True, tells_tokens=False)
        self.scheduler = DecodeScheduler(
            self.pool, intake=Intake(BLOCK_SIZE), max_running=8, growth_tokens=8
        )
        self.ended = []
        self.steps = 0

    def adopt(self, number, prompt_len, answer_len):
        """A sequence whose prompt was computed here comes, unless there is no memory for it."""
        seq = Sequence(
            SeqId(f"{number}"),
            GATEWAY,
            list(range(100 * number, 100 * number + prompt_len)),
            Sampling(seed=number),
            Limits(max_len=prompt_len + answer_len),
            BLOCK_SIZE,
        )
        if seq.num_blocks > self.pool.num_idle:
            return
        seq.block_table += self.pool.allocate(seq.num_blocks)
        seq.advance(prompt_len, self.pool)
        seq.append(7)
        assert self.scheduler.handle(Adopted(seq), 0.0) == []

    def cancel(self, number):
        self.scheduler.handle(FromGateway(GATEWAY, Cancel(SeqId(f"{number}"))), 0.0)

    def note(self, effects):
        messages = [effect.message for effect in effects if isinstance(effect, Emit)]
        for message in messages:
            if isinstance(message, GivenBack):
                self.ended.append((self.steps, message))
            elif isinstance(message, TokensMessage) and message.finish is not None:
                self.ended.append((self.steps, message.seq_id, message.finish))

    @property
    def facts(self):
        counters = dict(self.scheduler.counters)
        counters.pop("spec_steps", None)
        return self.scheduler.workload, self.pool.counts(), self.pool.take_news(), counters


class Stepping(Side):
    def run(self, num_steps):
        for _ in range(num_steps):
            scheduled = self.scheduler.schedule(99, 0.0)
            self.note(scheduled.effects)
            self.steps += 1
            for row in scheduled.rows:
                first = 1000 * (1 + row.sampling.seed) + row.end
                self.note(self.scheduler.advance(row, RowResult((first,)), 0.0))


class Counting(Side):
    def run(self, num_steps):
        while num_steps:
            alike, effects = self.scheduler.schedule_alike(following, 0.0)
            self.note(effects)
            number = num_steps if alike is None else min(alike.num_steps, num_steps)
            self.steps += number
            if alike is not None:
                load = self.scheduler.workload
                assert alike.num_rows == load.decode_seqs
                assert alike.num_context_tokens == load.context_tokens
                self.note(self.scheduler.advance_alike(number))
            num_steps -= number


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("adopt"), st.integers(1, 12), st.integers(2, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 6)),
        st.tuples(st.just("run"), st.integers(1, 12)),
        st.tuples(st.just("write down")),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(COMMANDS, st.sampled_from((6, 12, 60)))
def test_counted_steps_come_to_what_steps_come_to_that_are_run(commands, num_blocks):
    stepping, counting = Stepping(num_blocks), Counting(num_blocks)
    number = 0
    for name, *numbers in commands:
        for side in (stepping, counting):
            match name:
                case "adopt":
                    side.adopt(number, *numbers)
                case "cancel":
                    side.cancel(*numbers)
                case "run":
                    side.run(*numbers)
                case _:
                    side.scheduler.validate()
        number += name == "adopt"
        assert counting.ended == stepping.ended
        assert counting.facts == stepping.facts
    for side in (stepping, counting):
        side.run(40)
        side.scheduler.validate()
        side.pool.validate()
    assert counting.ended == stepping.ended
    assert counting.facts == stepping.facts
    assert counting.scheduler.num_running == 0


def test_a_sequence_is_written_down_when_steps_are_run_again():
    side = Counting(60)
    side.adopt(0, 5, 20)
    side.run(3)
    [row] = side.scheduler.schedule(99, 0.0).rows
    assert (row.start, row.end) == (8, 9)
    assert list(row.token_ids) == [1000 + 8]


def test_who_has_begun_and_who_has_ended_is_told_once():
    side = Counting(60)
    side.adopt(0, 5, 4)
    side.scheduler.schedule_alike(following, 0.0)
    [begun] = side.scheduler.advance_alike(1)
    assert begun.message == TokensMessage(SeqId("0"), [])
    side.scheduler.schedule_alike(following, 0.0)
    [ended] = side.scheduler.advance_alike(2)
    assert ended.message == TokensMessage(SeqId("0"), [], FinishReason.LENGTH)


def test_a_step_is_held_for_what_has_moved_here_where_steps_are_counted_too():
    side = Counting(num_blocks=20)
    side.adopt(1, prompt_len=6, answer_len=20)
    lease = LeaseRef("2", TransferAddress("d0", "inc", "tcp://d0"), 2)
    decode = Decode(SeqId("2"), [*range(6)], Sampling(), Limits(20), lease, is_moved=True)
    side.scheduler.handle(FromGateway(GATEWAY, decode), 0.0)
    alike, effects = side.scheduler.schedule_alike(following, 0.0)
    assert alike is None
    assert [type(effect) for effect in effects] == [StartPull]
    assert side.scheduler.held_until_s == HOLD_S
    side.scheduler.handle(FromGateway(GATEWAY, FirstToken(SeqId("2"), 7)), 0.01)
    side.scheduler.handle(PullDone(SeqId("2"), "shm"), 0.01)
    alike, _ = side.scheduler.schedule_alike(following, 0.01)
    assert alike is not None
    assert alike.num_rows == 2
    assert side.scheduler.held_until_s is None
