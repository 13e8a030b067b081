"""What all benchmarks share: reports, tables, plots, statistics, processes."""
