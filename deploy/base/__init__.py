"""What all rooms of `deploy` share: launch specs, run folder, defaults and small tools."""
