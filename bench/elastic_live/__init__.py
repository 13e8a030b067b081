"""`baton bench elastic-live`: a changing load on a real deployment with and without planner."""
