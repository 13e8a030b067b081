"""Tests of the scripts that run peers."""
