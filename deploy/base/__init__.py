"""Code that all folders of `deploy` share: launch specs, run folder, defaults, small tools."""
