"""`baton bench interference`: how much prompts hold up running streams."""
