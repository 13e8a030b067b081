"""Why sequences move. `engine.messages.ROLE_CHANGED` is the other reason for which they must."""

DRAINED = "drained"  # its worker has no role any more
# Reasons of moves of sequences that may stay.
BALANCED = "balanced"  # the target is faster
LENT = "lent"  # the target is a prefill worker that has no prompts
GIVEN_BACK = "given back"  # prompts wait for the prefill worker that decodes it
GATHERED = "gathered"  # the same, and it goes to a prefill worker that decodes more
FREE = (BALANCED, LENT, GIVEN_BACK, GATHERED)
COUNTED_AS = {BALANCED: "balance", LENT: "lend", GIVEN_BACK: "give back", GATHERED: "gather"}
