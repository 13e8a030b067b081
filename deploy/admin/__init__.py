"""The operator's HTTP API: its server, its schema and its client."""
