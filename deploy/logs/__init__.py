"""Writes, keeps and reads log lines."""
