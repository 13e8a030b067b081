"""The objects of one folder, through fsspec. Every method blocks, perhaps for ever.

The library of a URL scheme finds its credentials itself. Its error messages may contain the
credentials, so only the types of errors leave this module.
"""

import importlib
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from engine.errors import BatonError, ConfigError
from kvtransfer.store.objects.manifest import ObjectFacts


class ObjectStoreFailed(BatonError):
    """The object store or its library failed. The object tier never passes this error on."""


class ByteRange(NamedTuple):
    """Bytes `start` … `end` - 1 of one object."""

    name: str
    start: int
    end: int


class ObjectFiles:
    """Lists, reads, writes and deletes the objects of a folder below `url`."""

    def __init__(self, url: str, folder: str) -> None:
        self._url = url
        self._folder = folder
        self._fsspec: Any = None
        # the fsspec file system; created by the first call, because creating it may block
        self._files: Any = None
        self._path = ""

    def open(self) -> None:
        """Imports the scheme's library. Makes no connection. Raises ConfigError."""
        scheme, found, rest = self._url.partition("://")
        if not found or not rest.strip("/") or any(c in self._url for c in "*?[]"):
            raise ConfigError("the object tier needs a URL such as s3://bucket/folder")
        try:
            self._fsspec = importlib.import_module("fsspec")
            self._fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise ConfigError(f"the object tier cannot use {scheme}://: {error}") from error
        except ValueError as error:
            raise ConfigError(f"the object tier knows no scheme {scheme}://") from error

    def list_all(self) -> list[ObjectFacts]:
        """Returns all objects of the folder, if it exists. Raises ObjectStoreFailed."""
        with _library():
            files = self._connected()
            files.invalidate_cache()
            try:
                listed = files.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return [_facts(one) for one in listed if one["type"] == "file"]

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes | ObjectStoreFailed | None]:
        """Reads ranges, concurrently if the library can. The result is None for an object that does
        not exist.

        Raises ObjectStoreFailed if no range could be read.
        """
        with _library():
            answers = self._connected().cat_ranges(
                [self._path_of(one.name) for one in ranges],
                [one.start for one in ranges],
                [one.end for one in ranges],
                on_error="return",
            )
            results = [_result(answer) for answer in answers]
            if len(results) != len(ranges):
                raise ObjectStoreFailed("WrongCount")
        failures = [result for result in results if isinstance(result, ObjectStoreFailed)]
        if failures and len(failures) == len(results):
            raise failures[0]
        return results

    def write(self, name: str, data: bytes) -> None:
        """Writes an object. Raises ObjectStoreFailed."""
        with _library():
            self._connected().pipe_file(self._path_of(name), data)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects, if they exist. Raises ObjectStoreFailed."""
        if not names:
            return
        paths = [self._path_of(name) for name in names]
        with _library():
            files = self._connected()
            try:
                files.rm(paths)
            except FileNotFoundError:  # some libraries stop at the first object that does not exist
                for path in paths:
                    _delete_one(files, path)

    def _connected(self) -> Any:
        if self._files is None:
            options = {"skip_instance_cache": True}
            if self._url.startswith(("file://", "local://")):
                # a file system needs folders for the objects, and object stores have none
                options["auto_mkdir"] = True
            files, root = self._fsspec.core.url_to_fs(self._url, **options)
            self._path = f"{root.rstrip('/')}/{self._folder}"
            self._files = files
        return self._files

    def _path_of(self, name: str) -> str:
        return f"{self._path}/{name}"


@contextmanager
def _library() -> Iterator[None]:
    """Converts any exception of a scheme's library to ObjectStoreFailed."""
    try:
        yield
    except ObjectStoreFailed:
        raise
    except (Exception, CancelledError) as error:
        raise ObjectStoreFailed(type(error).__name__) from error


def _result(answer: object) -> bytes | ObjectStoreFailed | None:
    if isinstance(answer, bytes):
        return answer
    if isinstance(answer, FileNotFoundError):
        return None
    return ObjectStoreFailed(type(answer).__name__)


def _delete_one(files: Any, path: str) -> None:
    try:
        files.rm_file(path)
    except FileNotFoundError:
        return  # another store has deleted the object


def _facts(listed: dict[str, Any]) -> ObjectFacts:
    size = listed.get("size")
    name = str(listed["name"]).rpartition("/")[2]
    return ObjectFacts(name, size if isinstance(size, int) else -1, _modified_s(listed))


def _modified_s(listed: dict[str, Any]) -> float | None:
    """Returns when an object was written. Libraries use different keys for this time."""
    for key in ("mtime", "LastModified", "updated", "created"):
        told = listed.get(key)
        if isinstance(told, str):
            told = datetime.fromisoformat(told)
        if isinstance(told, datetime):
            return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
        if isinstance(told, int | float):
            return float(told)
    return None
