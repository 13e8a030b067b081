"""Measurement: load against a live server, and the one shape in which every benchmark reports."""
