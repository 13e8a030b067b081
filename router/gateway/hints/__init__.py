"""Session hints of clients, on their way to the stores of KV blocks."""
