"""The transports, which move blocks between endpoints: one file and class per transport."""
