"""Files and batches: jobs of many requests by file, which run while the pools are idle."""
