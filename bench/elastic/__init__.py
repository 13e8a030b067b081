"""`baton bench elastic`: a changing load on simulated pools with and without planner."""
