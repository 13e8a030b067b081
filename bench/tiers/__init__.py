"""Simulates a trace with and without stores of KV, of several sizes."""
