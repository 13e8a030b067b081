"""Nurseries whose children are something lighter than services."""

from deploy.local.nursery import Nursery

PROGRAM = """
import os, socket, sys
from deploy.local.nursery_main import fork_until_closed

def prepare(kind):
    pass

{prepare}
kind = fork_until_closed(socket.socket(fileno=int(sys.argv[-1])), prepare)
if kind is not None:
    {become}
"""


def nursery_of(become: str, prepare: str = "") -> Nursery:
    """Children run a statement; `prepare` is what the nursery does at its start."""
    return Nursery(("-c", PROGRAM.format(prepare=prepare, become=become)))


def nursery_of_shells(script: str) -> Nursery:
    """Children run a shell script."""
    return nursery_of(f"os.execv('/bin/sh', ['sh', '-c', {script!r}])")
