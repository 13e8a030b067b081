"""Steps that are queued on a GPU while the step before them is still being computed.

The tokens that a step chooses stay on the device, where the next step reads them
(`CudaForward.remember`). So the next step can be queued before the host knows these tokens. The
host reads the tokens after the step's fence, from pinned memory to which the device copies them.

Some choices need all earlier tokens on the host: penalties, and grammars. If a pending row has such
a choice, the choices of its step are queued late: at the next `launch`, or when the result is
requested. By then the result of the step before has been returned, and the row's `history` and
`guide` include its token. The device computes the pass itself in the meantime.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.clock import Clock
from engine.messages import SeqId
from engine.model.cuda import CudaForward
from engine.model.sampling import verify
from engine.model.sampling.draft import DraftedRow, Masks
from engine.worker.batch import BatchPlan, BatchResult, RowResult, StepTimes

NUM_HELD = 2  # most steps in flight, each with memory for its tokens


class TokenMemory:
    """Host memory for the tokens of the steps in flight. On a GPU it is pinned."""

    def __init__(self, num_tokens: int, *, pinned: bool) -> None:
        self._held = [
            torch.empty(num_tokens, dtype=torch.int64, pin_memory=pinned) for _ in range(NUM_HELD)
        ]
        self._num_taken = 0

    def reserve(self, num_tokens: int) -> torch.Tensor:
        """Returns memory for tokens; the call after the next call returns the same memory again."""
        memory = self._held[self._num_taken % NUM_HELD]
        self._num_taken += 1
        return memory[:num_tokens]


class OverlappedStep:
    """A step without drafts that was launched."""

    def __init__(
        self,
        plan: BatchPlan,
        forward: CudaForward,
        masks: Masks,
        clock: Clock,
        before: "OverlappedStep | None",
        memory: TokenMemory,
    ) -> None:
        """`before` is the previous step, if it is still in flight."""
        self._proposals = [DraftedRow(row) for row in plan.rows]
        self._forward = forward
        self._masks = masks
        self._clock = clock
        self._before = before
        self._memory = memory
        self._chosen: torch.Tensor | None = None  # in host memory; valid after the fence
        self._logits: torch.Tensor | None = None
        self._fence: torch.cuda.Event | None = None
        self._has_chosen = False
        self.end_s = 0.0  # end of the step; set when its result is known

    @torch.inference_mode()
    def launch(self) -> None:
        """Queues the pass. Also queues the choices, unless they need tokens that the host does not
        know yet.
        """
        self._begin_s = self._clock.now_s()
        if self._before is not None:
            self._before.choose()
        rows = [proposal.row for proposal in self._proposals]
        places = {} if self._before is None else self._before.places()
        follows = [places[row.seq_id] if row.is_pending else None for row in rows]
        keep = verify.wanted(self._proposals)
        prepared = self._forward.prepare(rows, keep, follows)
        self._prepared_s = self._clock.now_s()
        self._logits = self._forward.launch(prepared)
        self._launched_s = self._clock.now_s()
        if not any(row.is_pending and (row.guide or row.history is not None) for row in rows):
            self.choose()

    def places(self) -> Mapping[SeqId, int]:
        """Returns the index of each sequence's token, among the tokens that the step chooses."""
        chosen = (p.row.seq_id for p in self._proposals if p.row.sampling is not None)
        return {seq_id: place for place, seq_id in enumerate(chosen)}

    @torch.inference_mode()
    def choose(self) -> None:
        """Queues the choices, their copy to the host, and the fence. A second call has no
        effect.
        """
        if self._has_chosen:
            return
        self._has_chosen = True
        self._masks.start(self._proposals)()
        asked = verify.choices(self._proposals)
        logits = self._logits
        assert logits is not None
        if asked:
            chosen = self._forward.sample(logits[: len(asked)], asked)
            self._forward.remember(chosen)
            self._chosen = self._memory.reserve(len(asked))
            self._chosen.copy_(chosen, non_blocking=True)
        # The logits are copied, because the next step overwrites them.
        self._logits = logits.clone() if verify.needs_logits(self._proposals) else None
        self._fence = self._forward.fence()

    def result(self) -> BatchResult:
        """Waits for the fence. After that, K and V of all tokens are in the buffer."""
        self.choose()
        if self._fence is not None:
            self._fence.synchronize()
        self.end_s = self._clock.now_s()
        begin_s = self._begin_s
        if self._before is not None:
            begin_s = max(begin_s, self._before.end_s)
            self._before = None
        chosen = [] if self._chosen is None else self._chosen.tolist()
        rows: Sequence[RowResult] = verify.results(self._proposals, chosen, self._logits)
        return BatchResult(rows, self._times(begin_s))

    def _times(self, begin_s: float) -> StepTimes:
        """Returns the parts of the step's time. The step starts at `begin_s`, when the device
        became free.
        """
        prepared_s = max(begin_s, self._prepared_s)
        launched_s = max(begin_s, self._launched_s)
        return StepTimes(
            prepare_s=prepared_s - begin_s,
            forward_s=launched_s - prepared_s,
            sample_s=self.end_s - launched_s,
        )
