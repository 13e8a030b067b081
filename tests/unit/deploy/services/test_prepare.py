"""Libraries are built before services want them, and a start that ends also ends its compilers."""

import os
import sys

import pytest

from deploy.services import prepare
from deploy.services.prepare import ATTENTION, LIBRARIES, SERVING, Preparation
from engine.layout import KVFormat
from engine.native_build import cache_folder, is_built
from tests.kits.services.served import poll_until

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1.0; exit 0; fi
{wait}
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


@pytest.fixture
def use_compiler(tmp_path, monkeypatch):
    """Makes a script the compiler, and a new folder the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def use(wait=""):
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(wait=wait))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return use


def test_all_libraries_are_built(use_compiler, monkeypatch):
    monkeypatch.setattr(prepare.signal, "signal", lambda *_: None)
    use_compiler()
    assert prepare.main() == 0
    assert all(is_built(sources) for sources in LIBRARIES.values())
    assert {sources.name for sources in SERVING} < set(LIBRARIES)


def test_a_start_builds_what_serving_needs(use_compiler):
    use_compiler()
    preparation = Preparation()
    preparation.start({KVFormat.INT8})
    poll_until(lambda: not preparation.is_running, "all is built", 60)
    assert {path.name.rpartition("-")[0] for path in cache_folder().iterdir()} == {
        sources.name for sources in (*SERVING, ATTENTION[KVFormat.INT8])
    }


def test_a_later_start_builds_nothing(use_compiler, monkeypatch):
    monkeypatch.setattr(prepare.signal, "signal", lambda *_: None)
    use_compiler()
    prepare.main([sources.name for sources in (*SERVING, ATTENTION[KVFormat.INT8])])
    monkeypatch.setattr(sys, "executable", "/there/is/none")
    preparation = Preparation()
    preparation.start({KVFormat.INT8})
    assert not preparation.is_running
    preparation.close()


def test_a_start_that_ends_ends_its_compilers(use_compiler, tmp_path):
    begun, never = tmp_path / "begun", tmp_path / "never"
    os.mkfifo(begun)
    os.mkfifo(never)
    use_compiler(f"echo > {begun}; read line < {never}")
    preparation = Preparation()
    preparation.start({KVFormat.INT8})
    begun.read_text()  # returns when a compiler runs
    preparation.close()
    assert not preparation.is_running
    assert not [path for path in cache_folder().iterdir() if path.suffix == ".so"]


def test_without_a_compiler_a_start_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    preparation = Preparation()
    preparation.start({KVFormat.INT8})
    assert not preparation.is_running
    preparation.close()
