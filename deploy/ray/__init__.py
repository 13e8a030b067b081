"""A deployment on a Ray cluster: its launcher, its controller, `baton up`."""
