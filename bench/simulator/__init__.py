"""Simulates a cluster: the real router and schedulers play a trace under a virtual clock."""
