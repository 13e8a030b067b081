"""Files and batches: a file lists many requests, which run while the pools are idle."""
