"""The transports, which move blocks between endpoints. Each has its own file and class."""
