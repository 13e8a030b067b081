"""Log lines: how processes write and keep them, and how operators read them."""
