"""Which tokens a grammar or JSON Schema allows next."""
