"""Computes how many GPUs a load needs, by formulas that simulation checks."""
