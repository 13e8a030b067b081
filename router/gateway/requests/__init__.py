"""Converts the body of an HTTP request to checked requests for the router."""
