"""How many workers each pool should have, from the load that gateways report. Pure."""
