"""Unit tests cannot use sockets, sleep or Ray, and cannot import heavy libraries."""

import socket
import subprocess
import sys
import time
from importlib.abc import MetaPathFinder
from types import SimpleNamespace

import pytest

HEAVY = ("torch", "transformers", "ray")


class Forbidden(Exception):
    """A unit test used something that only end-to-end tests may use."""


class HeavyImports(MetaPathFinder):
    """Hides heavy libraries, like an installation of the core alone."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"unit tests do without {fullname}", name=fullname)


_open_socket = socket.socket.__init__
_real_time = SimpleNamespace(**vars(time))


def _adopt_socket(self, family=-1, type=-1, proto=-1, fileno=None):
    """Allows only existing descriptors, because asyncio's loops need a socket pair for wake-ups."""
    if fileno is None:
        raise Forbidden("a unit test opens a socket")
    _open_socket(self, family, type, proto, fileno)


def _sleep(seconds):
    raise Forbidden(f"a unit test sleeps for {seconds} s")


def _init_ray(*args, **kwargs):
    raise Forbidden("a unit test starts Ray")


@pytest.fixture(autouse=True)
def _nothing_forbidden(monkeypatch):
    monkeypatch.setattr(socket.socket, "__init__", _adopt_socket)
    monkeypatch.setattr(time, "sleep", _sleep)
    # subprocess uses sleep to wait for its child
    monkeypatch.setattr(subprocess, "time", _real_time)
    monkeypatch.setattr(sys, "meta_path", [HeavyImports(), *sys.meta_path])
    if "ray" in sys.modules:  # a test of another folder has imported Ray
        monkeypatch.setattr(sys.modules["ray"], "init", _init_ray)
