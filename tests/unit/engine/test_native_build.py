"""A library is built once for each set of inputs, and build failures are reported."""

import fcntl
import os
import platform
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engine import native_build
from engine.errors import BuildError
from engine.native_build import FLAGS, Sources, built_library, cache_folder, is_built

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1.0; exit 0; fi
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""
FAILING = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo 'In file included' >&2; echo 'main.cpp:1: error: no' >&2; exit 1
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "main.cpp").write_text("int x;")
    (folder / "part.h").write_text("")
    return Sources("thing", folder, "main.cpp")


@pytest.fixture
def use_compiler(tmp_path, monkeypatch):
    """Makes a script the compiler."""

    def use(script):
        path = tmp_path / "compiler"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return use


@pytest.fixture
def log(tmp_path, use_compiler):
    """The arguments of each call of a compiler that always succeeds."""
    path = tmp_path / "log"
    use_compiler(COMPILER.format(log=path))
    return path


def test_a_library_is_built_once(sources, log):
    path = built_library(sources)
    assert path.read_text() == "built\n"
    assert built_library(sources) == path
    (call,) = log.read_text().splitlines()
    assert call.startswith(f"{' '.join(FLAGS)} {sources.folder / 'main.cpp'} -o ")
    assert path.parent == cache_folder()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.name.startswith("thing-")


def test_each_source_compiler_or_flag_has_its_own_library(sources, log, use_compiler):
    paths = {built_library(sources), built_library(replace(sources, flags=("-O0",)))}
    (sources.folder / "part.h").write_text("// changed")
    paths.add(built_library(sources))
    use_compiler(COMPILER.format(log=log).replace("1.0", "1.1"))
    paths.add(built_library(sources))
    assert len(paths) == len(log.read_text().splitlines()) == 4


def test_a_compiler_that_fails_is_named_with_its_first_error(sources, use_compiler):
    compiler = use_compiler(FAILING)
    with pytest.raises(BuildError, match=rf"{compiler} failed: main\.cpp:1: error: no"):
        built_library(sources)
    assert list(cache_folder().iterdir()) == []


def test_a_compiler_that_does_not_run_is_named(sources, use_compiler):
    compiler = use_compiler("#!/bin/sh\nexit 3\n")
    with pytest.raises(BuildError, match=f"{compiler} does not run"):
        built_library(sources)


def test_without_a_compiler_there_is_no_library(sources, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        built_library(sources)


def test_a_cache_that_cannot_be_written_is_reported(sources, log, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"building thing-.* failed"):
        built_library(sources)


def test_other_processors_have_no_library(sources, log, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BuildError, match="riscv64"):
        built_library(sources)


def test_a_built_library_is_writable_by_its_owner_alone(sources, log):
    path = built_library(sources)
    assert path.stat().st_mode & 0o777 == 0o500
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def plant(sources) -> tuple[Path, Path]:
    """A file that another user might leave under a library's name, and its folder."""
    path = built_library(sources)
    path.chmod(0o700)
    path.write_text("planted")
    return path, path.parent


def open_to_all(path: Path, folder: Path) -> None:
    folder.chmod(0o777)


def open_above(path: Path, folder: Path) -> None:
    folder.parent.parent.chmod(0o777)


def writable_file(path: Path, folder: Path) -> None:
    path.chmod(0o722)


def link(path: Path, folder: Path) -> None:
    path.unlink()
    path.symlink_to(folder.parent.parent.parent / "elsewhere.so")
    path.resolve().write_text("planted")


def linked_folder(path: Path, folder: Path) -> None:
    folder.rename(folder.parent / "moved")
    folder.symlink_to(folder.parent / "moved")


@pytest.mark.parametrize(
    "meddle",
    [open_to_all, open_above, writable_file, link, linked_folder],
    ids=lambda f: f.__name__,
)
def test_a_library_writable_by_others_is_rebuilt_in_private(
    sources, log, caplog, monkeypatch, meddle
):
    monkeypatch.setitem(native_build.counters, "private_builds", 0)
    path, folder = plant(sources)
    meddle(path, folder)
    again = built_library(sources)
    assert again.read_text() == "built\n"
    assert again.parent not in (path.parent, folder.parent / "moved")
    assert again.parent.stat().st_mode & 0o777 == 0o700
    assert native_build.counters["private_builds"] == 1
    assert "is not to be trusted" in caplog.text


def test_another_users_library_is_rebuilt_in_private(sources, log, monkeypatch):
    path, _ = plant(sources)
    as_it_is = Path.lstat

    def lstat(self: Path) -> os.stat_result:
        facts = list(as_it_is(self))
        if self == path:
            facts[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert built_library(sources).read_text() == "built\n"


def test_other_compilers_get_their_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = native_build.compiler_cache("inductor")
    assert folder == tmp_path / "baton" / "inductor"
    folder.chmod(0o777)
    private = native_build.compiler_cache("inductor")
    assert private != folder
    assert private.stat().st_mode & 0o777 == 0o700


def test_processes_that_want_the_same_library_build_it_once(sources, log, use_compiler, tmp_path):
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    waiting = COMPILER.replace('echo "$@"', f'read line < {fifo}\necho "$@"')
    use_compiler(waiting.format(log=log))
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(built_library, sources) for _ in range(2)]
        with fifo.open("w") as go:  # opens when a compiler reads
            go.write("go\n")
        assert found[0].result() == found[1].result()
    assert len(log.read_text().splitlines()) == 1
    assert [path.suffix for path in cache_folder().iterdir()] == [".so"]


def test_a_library_is_built_where_files_cannot_be_locked(sources, log, monkeypatch):
    def refuse(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert built_library(sources).read_text() == "built\n"


def test_what_is_in_the_cache_is_built(sources, log):
    assert not is_built(sources)
    built_library(sources)
    assert is_built(sources)
