"""A client of an OpenAI-compatible server: requests, streams, arrivals and their figures."""
