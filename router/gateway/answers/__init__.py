"""From the router's updates to the bytes of an answer, whole or streamed."""
