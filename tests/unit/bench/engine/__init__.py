"""Tests of `baton bench engine`."""
