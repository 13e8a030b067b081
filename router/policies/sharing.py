"""Rules of every policy: followers of a group, and the choice of a decode worker."""

from engine.messages import WorkerId
from router.policies.base import Asked, Decision, Worker
from router.policies.candidates import has_memory, least, predicted_ready_s, promised_share


def with_leader(asked: Asked, policy: str) -> Decision | None:
    """Returns the two workers of the leader of the group, if they have room."""
    shared = asked.need.shared
    if shared is None:
        return None
    near, candidates = shared.placement, asked.candidates
    if not _has_time(asked, near.prefill):
        return None
    if (near.prefill, near.decode) in asked.view.severed:
        return None
    if not any(worker_id == near.decode for worker_id, _ in candidates.decoders):
        return None
    return Decision(
        policy,
        "with its leader",
        near.prefill,
        near.decode,
        len(candidates.prefillers),
        num_matched_tokens=shared.num_tokens,
    )


def _has_time(asked: Asked, worker_id: WorkerId) -> bool:
    """True if the worker can start another prompt now, as a prefill or a fluid worker."""
    if any(worker_id == candidate for candidate, _ in asked.candidates.prefillers):
        return True
    worker = asked.view.workers.get(worker_id)
    if worker is None or not worker.info.is_fluid:
        return False
    ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
    has_time = ready_s is not None and ready_s <= asked.wait_bound_s
    return has_time and has_memory(worker, asked.need.max_len)


def emptiest_decoder(asked: Asked, prefill: Worker) -> WorkerId:
    """Returns the decode worker that kept most of the prompt.

    Among equals, the worker with the smallest promised share of KV is chosen. A mixed worker
    decodes what it prefills.
    """
    prefill_id, worker = prefill
    if worker.info.role.decodes:
        return prefill_id

    def cost(item: Worker) -> tuple[float, ...]:
        decode_id, decoder = item
        return -asked.need.kept_tokens.get(decode_id, 0), promised_share(decoder)

    equals = least(asked.candidates.partners(prefill_id), cost)
    return asked.rng.choice(equals)[0]


def kept_tokens(asked: Asked, prefill: Worker) -> int:
    """Returns the most tokens that an earlier attempt left in a partner of this prefill worker."""
    if not asked.need.kept_tokens:
        return 0
    kept = asked.need.kept_tokens
    return max((kept.get(i, 0) for i, _ in asked.candidates.partners(prefill[0])), default=0)
