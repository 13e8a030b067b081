"""Nurseries whose child processes are small scripts instead of services."""

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
    """Returns a nursery whose children run a statement; `prepare` runs once when the nursery
    starts."""
    return Nursery(("-c", PROGRAM.format(prepare=prepare, become=become)))


def nursery_of_shells(script: str) -> Nursery:
    """Returns a nursery whose children run a shell script."""
    return nursery_of(f"os.execv('/bin/sh', ['sh', '-c', {script!r}])")
