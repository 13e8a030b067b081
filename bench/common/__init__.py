"""Code that all benchmarks share: reports, tables, plots, statistics, processes."""
