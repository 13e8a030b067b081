"""Tests; a package, so that helpers can be shared between folders."""
