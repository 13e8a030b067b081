"""A deployment on Ray: launchers, the controller's actor, and `baton up`."""
