"""Plans that tests of benchmarks share."""
