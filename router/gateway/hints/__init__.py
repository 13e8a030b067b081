"""What clients say about their sessions, on its way to the stores of KV blocks."""
