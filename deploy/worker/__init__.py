"""The worker's process: the threads and sockets around the pure core of a worker."""
