"""Chunked prefill of prompts in their order of arrival.

The life of a sequence, and the part that owns it:

    waiting, pulling   has no blocks, or waits for its prefix       `prefill.prompts`
    computing          runs chunk by chunk; its lease, if it has    this module
                       one, grows with each chunk
    leased             computed: the sequence is gone, its blocks   `engine.worker.offers`
                       belong to the lease until the lease ends

For a `Prefill`, the scheduler leases the blocks and drops the sequence after the first token. For a
`Generate`, it opens no lease and passes the sequence on to the decode scheduler of this worker. A
lease has the id of its sequence.

A prefix that is cached here is not computed again. The prompt's last token is always computed,
because the first token of the answer is sampled from its logits.

If log-probabilities of the prompt are wanted, the prompt is computed from its first token on, even
if a prefix is cached or offered. The log-probabilities are collected over the prompt's chunks and
sent with the first token of the answer.

The scheduler uses no clock, tensor or socket.

Source: chunked prefill, Agrawal et al., Sarathi-Serve, OSDI 2024.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from engine.grammar.guide import OpenedGuide
from engine.messages import (
    ROLE_CHANGED,
    GatewayId,
    Generate,
    GivenBack,
    LeaseId,
    Prefill,
    PrefillDone,
    PrefillStarted,
    SeqId,
    TransferAddress,
)
from engine.worker.batch import Row, RowResult
from engine.worker.blocks import BlockPool
from engine.worker.events import (
    NOTHING,
    Effect,
    Emit,
    GrowLease,
    PullDone,
    PullFailed,
    RevokeLease,
    Scheduled,
)
from engine.worker.intake import Intake
from engine.worker.offers import LeaseTable
from engine.worker.pace import StepPace
from engine.worker.sequence import Sequence as OpenSequence
from prefill.prompts import PendingPrompt, WaitingPrompts

# With this number of tokens, a step keeps a GPU busy; beyond it, time is proportional to tokens.
FULL_STEP_TOKENS = 512


class PrefillScheduler:
    """Schedules prompts from their arrival until the leases on their blocks end."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        intake: Intake,
        chunk_tokens: int,
        address: TransferAddress,
        adopt: Callable[[OpenSequence], list[Effect]],
        pace: StepPace | None = None,
    ) -> None:
        """Prompts that `intake` refuses are given back. Sinks pull from `address`.

        `adopt` is called with each sequence that this worker also decodes. `pace` limits the chunks
        in steps that also decode.
        """
        self._pool = pool
        self._intake = intake
        self._block_size = intake.block_size
        self._chunk_tokens = chunk_tokens
        self._adopt = adopt
        self._pace = pace
        self._num_prompts = 0  # number of prompts that have arrived since the start
        self._counters: Counter[str] = Counter()
        self.waiting = WaitingPrompts(pool, block_size=intake.block_size, counters=self._counters)
        # prompts that are being computed, in order of arrival
        self.computing: dict[SeqId, PendingPrompt] = {}
        self.leases = LeaseTable(pool, address)

    @property
    def num_waiting(self) -> int:
        """The number of prompts without a computed chunk."""
        return len(self.waiting.prompts())

    @property
    def num_running(self) -> int:
        """The number of prompts that are being computed."""
        return len(self.computing)

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts that are not fully computed, including cached tokens."""
        prompts = (*self.waiting.prompts(), *self.computing.values())
        return sum(len(prompt.seq.token_ids) for prompt in prompts)

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of pulled prefix blocks, and of offered prefixes that had to be computed
        instead.
        """
        return self._counters

    def give_back(self, accepted: Container[type]) -> list[Effect]:
        """Gives back the waiting prompts of the kinds that this worker no longer accepts."""
        effects: list[Effect] = []
        late = [prompt for prompt in self.waiting.waiting.values() if prompt.kind not in accepted]
        for prompt in reversed(late):  # the gateway puts each one at its queue's front
            seq = prompt.seq
            effects += self.cancel(seq.seq_id)
            effects.append(Emit(seq.gateway_id, GivenBack(seq.seq_id, ROLE_CHANGED)))
        return effects

    def enqueue(
        self, gateway_id: GatewayId, message: Prefill | Generate, guide: OpenedGuide | None
    ) -> list[Effect]:
        """Appends a prompt to the queue, or gives the prompt back."""
        seq_id, waiting = message.seq_id, self.waiting
        if (
            seq_id in waiting.waiting
            or seq_id in waiting.pulling
            or seq_id in self.computing
            or LeaseId(seq_id) in self.leases.opened
        ):
            return [Emit(gateway_id, GivenBack(seq_id, "the id is in use"))]
        seq = self._intake.open(gateway_id, message, guide)
        if isinstance(seq, GivenBack):
            return [Emit(gateway_id, seq)]
        if seq.num_prompt_blocks > self._pool.num_blocks:
            return [Emit(gateway_id, GivenBack(seq_id, "prompt exceeds the KV pool"))]
        hands_over = isinstance(message, Prefill)
        prompt = PendingPrompt(seq, hands_over, self._num_prompts, num_top=message.prompt_logprobs)
        self._num_prompts += 1
        return waiting.enqueue(prompt, message.prefix)

    def on_pull_ended(self, ended: PullDone | PullFailed) -> list[Effect]:
        """Makes a prompt computable whose prefix was pulled, or could not be pulled."""
        prompt = self.waiting.end_pull(ended)
        if prompt is None:
            return []
        effects = self._begin(prompt)
        # Later prompts may have started during the pull. From now on this prompt precedes them
        # again.
        in_order = sorted(self.computing.items(), key=lambda item: item[1].number)
        self.computing = dict(in_order)
        return effects

    # ------------------------------------------------------------ computing

    def schedule(self, budget_tokens: int) -> Scheduled:
        """Returns one chunk of each prompt, in order of arrival, while budget and memory last.

        A chunk may be scheduled while the previous chunk is in flight. If a chunk completes a
        prompt, the step gets few other tokens, since the prompt's first token waits for the whole
        step.
        """
        if not self.computing and not self.waiting.waiting:
            return NOTHING
        scheduled, left = Scheduled(), budget_tokens
        for prompt in self.computing.values():
            left = self._add_row(prompt, left, scheduled)
        while left > 0 and self.waiting.waiting:
            if self._pace is not None and self._pace.most_tokens(0) == 0:
                break  # `pace` leaves no tokens for another prompt
            started, effects = self.waiting.start_next()
            scheduled.effects += effects
            if started is None:
                break
            if not started.pulled:
                scheduled.effects += self._begin(started)
                left = self._add_row(started, left, scheduled)
        return scheduled

    def _begin(self, prompt: PendingPrompt) -> list[Effect]:
        """Opens the lease on the blocks of a prompt, if another worker decodes it."""
        seq = prompt.seq
        self.computing[seq.seq_id] = prompt
        lease, effects = None, list[Effect]()
        if prompt.hands_over and seq.limits.max_len > len(seq.token_ids) + 1:
            prompt.lease_id = LeaseId(seq.seq_id)
            num_ready = prompt.num_leased_ready = seq.num_computed_tokens // self._block_size
            lease, effects = self.leases.open(
                prompt.lease_id, seq.gateway_id, seq.block_table, num_ready=num_ready
            )
        started = PrefillStarted(
            seq.seq_id, seq.num_cached_tokens, lease, prompt.num_pulled, prompt.pull_s
        )
        return [*effects, Emit(seq.gateway_id, started)]

    def _add_row(self, prompt: PendingPrompt, left: int, scheduled: Scheduled) -> int:
        """Adds the next chunk of a prompt, of at most `left` tokens; returns the tokens left.

        If the chunk completes the prompt, the step is limited to `FULL_STEP_TOKENS` tokens in all.
        """
        seq = prompt.seq
        start = seq.num_computed_tokens
        for row in seq.in_flight:
            start += len(row.token_ids)
        num = min(left, self._chunk_tokens, len(seq.token_ids) - start)
        if self._pace is not None:
            most = self._pace.most_tokens(start)
            num = num if most is None else min(num, most)
        if num <= 0:
            return left
        if self._pace is not None:
            self._pace.add(start, num)
        token_ids = seq.token_ids[start : start + num]
        last = start + num == len(seq.token_ids)
        row = Row(
            seq_id=seq.seq_id,
            token_ids=token_ids,
            start=start,
            block_table=seq.block_table,
            sampling=seq.sampling if last else None,
            banned=seq.banned() if last else (),
            draft_token_ids=token_ids,
            history=seq.history if last else None,
            prompt_len=seq.limits.prompt_len,
            guide=seq.guide if last else None,
            scored=() if prompt.num_top is None else seq.token_ids[start + 1 : start + num + 1],
            num_top=prompt.num_top or 0,
        )
        scheduled.rows.append(row)
        scheduled.num_tokens += num
        seq.in_flight.append(row)
        room = max(FULL_STEP_TOKENS - scheduled.num_tokens, 0) if last else left
        return min(left - num, room)

    def advance(self, rows: Sequence[Row], results: Sequence[RowResult]) -> list[Effect]:
        """Counts chunks as computed. A prompt's last chunk yields the answer's first token."""
        effects: list[Effect] = []
        for row, result in zip(rows, results, strict=True):
            prompt = self.computing.get(row.seq_id)
            if prompt is None or not prompt.seq.in_flight or prompt.seq.in_flight[0] is not row:
                continue  # the prompt was cancelled during the step
            seq = prompt.seq
            del seq.in_flight[0]
            seq.advance(len(row.token_ids), self._pool)
            prompt.scored += result.scored
            if seq.guide is not None and result.token_ids and (fault := seq.fault) is not None:
                effects += self._give_up(prompt, fault)
                continue
            num_ready = seq.num_computed_tokens // self._block_size
            if result.token_ids:
                num_ready = len(seq.block_table)
            if prompt.lease_id is not None and num_ready > prompt.num_leased_ready:
                block_ids = tuple(seq.block_table[prompt.num_leased_ready : num_ready])
                prompt.num_leased_ready = num_ready
                effects.append(GrowLease(prompt.lease_id, block_ids))
            if result.token_ids:
                effects += self._complete(prompt, result)
        return effects

    # ------------------------------------------------------------ ends

    def _complete(self, prompt: PendingPrompt, result: RowResult) -> list[Effect]:
        """Passes a computed prompt on to the decode scheduler, or releases its blocks."""
        seq = prompt.seq
        del self.computing[seq.seq_id]
        [token], finish = seq.extend(result.token_ids)
        logprobs = result.logprobs[0] if result.logprobs else None
        done = PrefillDone(
            seq.seq_id, token, finish, logprobs, prompt.scored, embedding=result.embedding
        )
        effects: list[Effect] = [Emit(seq.gateway_id, done)]
        if not prompt.hands_over and finish is None:
            return effects + self._adopt(seq)
        seq.release(self._pool)  # the open lease, if any, still keeps the blocks
        if prompt.lease_id is not None and finish is not None:
            effects.append(RevokeLease(prompt.lease_id))
        return effects

    def _give_up(self, prompt: PendingPrompt, fault: str) -> list[Effect]:
        """Ends an answer that no worker can continue, with an error."""
        del self.computing[prompt.seq.seq_id]
        prompt.seq.release(self._pool)
        given_back = GivenBack(prompt.seq.seq_id, fault, hopeless=True)
        revoked = [] if prompt.lease_id is None else [RevokeLease(prompt.lease_id)]
        return [Emit(prompt.seq.gateway_id, given_back), *revoked]

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Removes a prompt, and revokes its lease."""
        effects: list[Effect] = []
        if (prompt := self.computing.pop(seq_id, None)) is not None:
            prompt.seq.release(self._pool)
        else:
            effects += self.waiting.cancel(seq_id)
        if LeaseId(seq_id) in self.leases.opened:
            effects.append(RevokeLease(LeaseId(seq_id)))
        return effects

    def remove_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        """Cancels the prompts of a lost gateway, and revokes the leases on its computed prompts."""
        prompts = [*self.waiting.prompts(), *self.computing.values()]
        mine = [prompt.seq.seq_id for prompt in prompts if prompt.seq.gateway_id == gateway_id]
        mine += map(SeqId, self.leases.of(gateway_id))
        return [effect for seq_id in dict.fromkeys(mine) for effect in self.cancel(seq_id)]

    def on_lease_ended(self, lease_id: LeaseId, reason: str) -> list[Effect]:
        """Releases the blocks of a lease that ended. Gives the prompt back if its sink is
        silent.
        """
        if not self.leases.close(lease_id):
            return []
        seq_id = SeqId(lease_id)
        prompt = self.computing.get(seq_id)
        if prompt is None:
            return []
        prompt.lease_id = None
        if reason != "expired":
            return []  # the sink has the blocks, or the sequence is being cancelled
        del self.computing[seq_id]
        prompt.seq.release(self._pool)
        return [Emit(prompt.seq.gateway_id, GivenBack(seq_id, "lease expired"))]

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        self.waiting.validate()
        assert not self.computing.keys() & self.waiting.pulling.keys()
        for seq_id, prompt in self.computing.items():
            assert prompt.prefix is None
            assert prompt.seq.seq_id == seq_id
            assert len(prompt.seq.block_table) == prompt.seq.num_prompt_blocks
            assert prompt.num_leased_ready <= prompt.seq.num_prompt_blocks
            if prompt.lease_id is not None:
                assert prompt.lease_id in self.leases.opened
