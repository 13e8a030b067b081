"""The reasons of moves. `engine.messages.ROLE_CHANGED` is another reason to leave a worker."""

DRAINED = "drained"  # the sequence's worker has lost its role
# Reasons of free moves: the sequence may also stay.
BALANCED = "balanced"  # the target is faster
LENT = "lent"  # the target is a prefill worker that has no prompts
GIVEN_BACK = "given back"  # prompts wait for the prefill worker that decodes the sequence
GATHERED = "gathered"  # like GIVEN_BACK, but to a prefill worker that decodes more
FREE = (BALANCED, LENT, GIVEN_BACK, GATHERED)
COUNTED_AS = {BALANCED: "balance", LENT: "lend", GIVEN_BACK: "give back", GATHERED: "gather"}
