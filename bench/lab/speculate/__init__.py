"""`baton bench speculate`: what speculation gains, by drafter and batch size."""
