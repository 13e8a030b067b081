"""Session hints of clients, which the gateway passes to the stores of KV blocks."""
