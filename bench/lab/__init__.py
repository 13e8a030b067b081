"""The studies of the laboratory. Each is an `Experiment` that `baton bench` has as a command."""
