"""`baton bench router`: how long a placement takes among thousands of workers."""
