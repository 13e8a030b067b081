"""Makes the folder from which a GGUF file is served: a link to the file, and files made from its
metadata.

The folder is `cache/gguf/NAME-KEY`. `engine.gguf.architecture` makes the files. If a file of the
same name exists beside the GGUF file, that file is copied instead. KEY is a hash over the identity
of all these files and over the code that makes them. So the contents of a folder never change.
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import engine.gguf
from deploy.fetching.cache import locked, storing
from engine.errors import CheckpointError
from engine.gguf.container import read_gguf
from engine.ownership import make_folder, require_trusted

CODE = Path(engine.gguf.__file__).parent


def folder_of_gguf(file: Path, own: Iterable[Path], *, cache: Path) -> Path:
    """Returns the folder for a GGUF file; makes it if necessary. `own` are the files beside it.

    Raises CheckpointError if the file cannot be served, and ConfigError.
    """
    top = cache.resolve()
    own = sorted(own)
    there = top / "gguf" / f"{file.stem[:80]}-{_key(file, own)}"
    if not there.is_dir():
        with storing(str(file), there.parent):
            make_folder(there.parent, top=top, mode=0o755)
            with locked(there.with_name(f"{there.name}.lock")):
                if not there.is_dir():
                    _make(file, own, there)
    require_trusted(there, top=top)
    return there


def _key(file: Path, own: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in (file, *own):
        facts = path.stat()
        digest.update(repr((str(path), facts.st_size, facts.st_mtime_ns, facts.st_ino)).encode())
    for path in sorted(CODE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _make(file: Path, own: Iterable[Path], there: Path) -> None:
    # Imported here, because this module imports numpy, which most commands do not need.
    from engine.gguf.architecture import described

    partial = there.with_name(f"{there.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o755)
    for name, content in described(read_gguf(file)).items():
        (partial / name).write_bytes(content)
    for path in own:
        shutil.copyfile(path, partial / path.name)
    for path in partial.iterdir():
        path.chmod(0o644)  # whatever the umask is
    (partial / file.name).symlink_to(file)
    partial.rename(there)


def only_gguf(folder: Path) -> Path | None:
    """Returns the folder's GGUF file, or None. Raises CheckpointError if there are several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{folder}: {len(files)} *.gguf files: only one is allowed")
    return files[0] if files else None
