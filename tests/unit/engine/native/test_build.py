"""A library is built once for each set of inputs, and build failures are reported."""

import fcntl
import os
import platform
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import BuildError
from engine.native import build
from engine.native.build import FLAGS, Unit, built_library, cache_folder, is_built

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
def units(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "main.cpp").write_text("int x;")
    (folder / "part.h").write_text("")
    monkeypatch.setattr(build, "SOURCES", folder)
    return (Unit("thing", "main.cpp"),)


@pytest.fixture
def use_compiler(tmp_path, monkeypatch):
    """Makes a script act as the compiler."""

    def use(script):
        path = tmp_path / "compiler"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return use


@pytest.fixture
def log(tmp_path, use_compiler):
    """Records the arguments of each call of a compiler that always succeeds."""
    path = tmp_path / "log"
    use_compiler(COMPILER.format(log=path))
    return path


def test_a_library_is_built_once(units, log):
    path = built_library(units)
    assert path.read_text() == "built\n"
    assert built_library(units) == path
    compiling, linking = log.read_text().splitlines()
    assert compiling.startswith(
        f"{' '.join(FLAGS)} -Dbaton=in_thing -c {build.SOURCES}/main.cpp -o "
    )
    assert linking.startswith("-shared ")
    assert path.parent == cache_folder()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.name.startswith("baton-")


def test_each_source_compiler_or_flag_has_its_own_library(units, log, use_compiler):
    paths = {built_library(units), built_library([replace(units[0], flags=("-O0",))])}
    (build.SOURCES / "part.h").write_text("// changed")
    paths.add(built_library(units))
    use_compiler(COMPILER.format(log=log).replace("1.0", "1.1"))
    paths.add(built_library(units))
    assert len(paths) == 4
    assert len(log.read_text().splitlines()) == 2 * 4


def test_a_compiler_that_fails_is_named_with_its_first_error(units, use_compiler):
    compiler = use_compiler(FAILING)
    with pytest.raises(BuildError, match=rf"{compiler} failed: main\.cpp:1: error: no"):
        built_library(units)
    assert list(cache_folder().iterdir()) == []


def test_a_compiler_that_does_not_run_is_named(units, use_compiler):
    compiler = use_compiler("#!/bin/sh\nexit 3\n")
    with pytest.raises(BuildError, match=f"{compiler} does not run"):
        built_library(units)


def test_without_a_compiler_there_is_no_library(units, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        built_library(units)


def test_a_cache_that_cannot_be_written_is_reported(units, log, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"building baton-.* failed"):
        built_library(units)


def test_other_processors_have_no_library(units, log, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BuildError, match="riscv64"):
        built_library(units)


def test_a_built_library_is_writable_by_its_owner_alone(units, log):
    path = built_library(units)
    assert path.stat().st_mode & 0o777 == 0o500
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def plant(units) -> tuple[Path, Path]:
    """Writes a file that another user could plant as a library. Returns the file and its folder."""
    path = built_library(units)
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
    units, log, caplog, monkeypatch, meddle
):
    monkeypatch.setitem(build.counters, "private_builds", 0)
    path, folder = plant(units)
    meddle(path, folder)
    again = built_library(units)
    assert again.read_text() == "built\n"
    assert again.parent not in (path.parent, folder.parent / "moved")
    assert again.parent.stat().st_mode & 0o777 == 0o700
    assert build.counters["private_builds"] == 1
    assert "is not to be trusted" in caplog.text


def test_another_users_library_is_rebuilt_in_private(units, log, monkeypatch):
    path, _ = plant(units)
    as_it_is = Path.lstat

    def lstat(self: Path) -> os.stat_result:
        facts = list(as_it_is(self))
        if self == path:
            facts[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert built_library(units).read_text() == "built\n"


def test_other_compilers_get_their_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build.compiler_cache("inductor")
    assert folder == tmp_path / "baton" / "inductor"
    folder.chmod(0o777)
    private = build.compiler_cache("inductor")
    assert private != folder
    assert private.stat().st_mode & 0o777 == 0o700


def test_processes_that_want_the_same_library_build_it_once(units, log, use_compiler, tmp_path):
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    waiting = COMPILER.replace('echo "$@"', f'[ "$1" = -shared ] || read line < {fifo}\necho "$@"')
    use_compiler(waiting.format(log=log))
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(built_library, units) for _ in range(2)]
        with fifo.open("w") as go:  # opens when the compiler reads
            go.write("go\n")
        assert found[0].result() == found[1].result()
    assert len(log.read_text().splitlines()) == 2
    assert [path.suffix for path in cache_folder().iterdir()] == [".so"]


def test_a_library_is_built_where_files_cannot_be_locked(units, log, monkeypatch):
    def refuse(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert built_library(units).read_text() == "built\n"


def test_what_is_in_the_cache_is_built(units, log, monkeypatch):
    monkeypatch.setattr(build, "UNITS", units)
    assert not is_built()
    built_library(units)
    assert is_built()


def test_no_compiler_runs_after_a_build_has_failed(units, use_compiler, tmp_path):
    begun, never = tmp_path / "begun", tmp_path / "never"
    os.mkfifo(begun)
    os.mkfifo(never)
    (build.SOURCES / "bad.cpp").write_text("")
    use_compiler(
        f"""#!/bin/sh
[ "$1" = --version ] && exit 0
case "$*" in *bad.cpp*) read line < {begun}; echo 'bad.cpp:1: error: no' >&2; exit 1;; esac
echo > {begun}; exec cat {never}
"""
    )
    with pytest.raises(BuildError, match=r"bad\.cpp"):
        built_library([*units, Unit("bad", "bad.cpp")])
    assert not [path for path in cache_folder().iterdir() if path.suffix == ".so"]
