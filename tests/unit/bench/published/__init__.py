"""Tests of `baton bench report`."""
