"""Converts the router's updates to the bytes of an answer, which is sent whole or streamed."""
