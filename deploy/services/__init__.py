"""The services, each of which runs in a separate process: worker, gateway and store."""
