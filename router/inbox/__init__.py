"""Limits on clients' bodies before they cost anything: JSON values, parsing threads, errors."""
