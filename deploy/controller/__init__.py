"""The shell around the pool machine: feeds events to the machine, and carries out its effects."""
