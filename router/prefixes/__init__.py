"""Which worker holds which cached prefix, from the workers' own events. Pure."""
