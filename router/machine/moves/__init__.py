"""Moves of running sequences to other decode workers: their stages and the rules."""
