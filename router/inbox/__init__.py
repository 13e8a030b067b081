"""Limits on clients' bodies before they cost much work: JSON values, parse pools, errors."""
