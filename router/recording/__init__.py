"""Records a request machine's events and effects for a later replay."""
