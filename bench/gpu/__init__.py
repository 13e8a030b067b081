"""`python -m bench.gpu`: checks and times the engine's GPU paths."""
