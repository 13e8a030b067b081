"""The decode role: pulls leased KV, and generates tokens with continuous batching."""
