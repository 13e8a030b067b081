"""The prefill role: turns prompts into KV blocks and leases them out."""
