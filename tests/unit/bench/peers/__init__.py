"""Tests of the scripts that run peer engines."""
