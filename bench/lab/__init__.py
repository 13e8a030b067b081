"""The studies of the lab. Each is an `Experiment` and has a command of `baton bench`."""
