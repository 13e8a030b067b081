"""Checks a gateway's message and turns it into a sequence.

Gateways check clients' requests and refuse bad requests with a status. This module only checks if a
step can run with the message. A request that the runner cannot compute would crash the worker, and
all other requests would fail with it. A message that fails the check is given back with the reason.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from math import inf, isfinite
from typing import NamedTuple

from engine.errors import GrammarError
from engine.grammar.guide import Guide, Guides, OpenedGuide
from engine.messages import ComputePrompt, Decode, GatewayId, GivenBack, OfferPrefix
from engine.worker.blocks import BlockHash, hash_blocks
from engine.worker.sequence import Sequence

MAX_ID = 2**31 - 1  # token ids are stored as signed 32-bit numbers
MAX_SEED = 2**64 - 1


class PromptFacts(NamedTuple):
    """Facts about a message's tokens: the hashes of all full blocks, and the largest id.

    If `token_ids` are set, they become the tokens of the sequence.
    """

    block_hashes: Items[BlockHash]
    largest_id: int
    token_ids: list[int] | None = None


ReadPrompt = Callable[[ComputePrompt | Decode | OfferPrefix, int], PromptFacts]


def read_prompt(message: ComputePrompt | Decode | OfferPrefix, block_size: int) -> PromptFacts:
    """Computes the facts of a message's tokens."""
    token_ids = message.token_ids
    return PromptFacts(hash_blocks(token_ids, block_size, message.salt), max(token_ids))


class Intake:
    """Turns the messages of gateways into sequences."""

    def __init__(
        self,
        block_size: int,
        guides: Guides | None = None,
        vocab_size: int | None = None,
        context_len: int | None = None,
        read: ReadPrompt = read_prompt,
    ) -> None:
        """A bound that is None is unknown. `guides` is None if there are no grammars.

        A caller that already has the facts of prompts passes its own `read`.
        """
        self.block_size = block_size
        self.last_id = MAX_ID if vocab_size is None else vocab_size - 1  # largest valid token id
        self.read = read
        self._guides = guides
        self._context_len = context_len

    def open(
        self,
        gateway_id: GatewayId,
        message: ComputePrompt | Decode,
        opened: OpenedGuide | None = None,
    ) -> Sequence | GivenBack:
        """Returns the sequence for a message, or the reason why the message is refused.

        `opened` is the guide of the message's grammar, if the shell has opened a guide.
        """
        facts = self.read(message, self.block_size)
        fault = self._fault(message, facts.largest_id)
        if fault is not None:
            return GivenBack(message.seq_id, fault, hopeless=True)
        try:
            has_grammar = opened is not None or message.sampling.grammar is not None
            guide = self._guide_of(message, opened) if has_grammar else None
        except GrammarError as error:
            return GivenBack(message.seq_id, f"grammar: {error}", hopeless=True)
        return Sequence(
            seq_id=message.seq_id,
            gateway_id=gateway_id,
            token_ids=list(message.token_ids) if facts.token_ids is None else facts.token_ids,
            sampling=message.sampling,
            limits=message.limits,
            block_size=self.block_size,
            salt=message.salt,
            block_hashes=list(facts.block_hashes),
            guide=guide,
            evict_first=message.evict_first,
            likely_reused=message.likely_reused,
        )

    def _guide_of(self, message: ComputePrompt | Decode, opened: OpenedGuide | None) -> Guide:
        """Returns the sequence's guide. Opens the guide unless it is open already. Raises
        GrammarError.
        """
        if isinstance(opened, GrammarError):
            raise opened
        if opened is not None:
            return opened
        grammar = message.sampling.grammar
        assert grammar is not None
        if self._guides is None:
            raise GrammarError("this worker follows no grammars")
        return self._guides.open(
            grammar, message.token_ids[message.limits.prompt_len :], message.salt
        )

    def _fault(self, message: ComputePrompt | Decode, largest_id: int) -> str | None:
        """Returns the reason why the message cannot be computed, or None."""
        limits, sampling, length = message.limits, message.sampling, len(message.token_ids)
        biased, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        ids = (largest_id, *limits.stop_token_ids, *biased)
        if not 0 <= min(ids) <= max(ids) <= self.last_id:
            return "a token id is not in the vocabulary"
        if not 0 <= limits.prompt_len <= length:
            return "the prompt is longer than the tokens"
        longest = max(limits.max_len, length)
        if self._context_len is not None and longest > self._context_len:
            return "the answer may exceed the context"
        scored = None if isinstance(message, Decode) else message.prompt_logprobs
        if not (
            0 <= (sampling.logprobs or 0) <= self.last_id and 0 <= (scored or 0) <= self.last_id
        ):
            return "that many log-probabilities are not available"
        penalties = (sampling.presence_penalty, sampling.frequency_penalty)
        numbers = (sampling.temperature, sampling.top_p, sampling.min_p, *penalties, *biases)
        is_sound = (  # sampling is defined only for these values
            all(map(isfinite, numbers))
            and 0 < sampling.repetition_penalty < inf
            and sampling.temperature >= 0
            and 0 <= sampling.top_k <= MAX_ID
            and 0 <= sampling.seed <= MAX_SEED
        )
        return None if is_sound else "a parameter of sampling is out of range"
