"""`baton bench speculate`: the speed-up by speculation, for each drafter and batch size."""
