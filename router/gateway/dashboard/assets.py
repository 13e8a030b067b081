"""The files of the pages: HTML, styles, scripts and the chart library, all from this package.

Files are read once. They contain no data: scripts fetch data, and insert it as text.
"""

from collections.abc import Iterator
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.responses import Response

PAGES = {"/": "index.html", "/dashboard": "dashboard.html", "/play": "play.html"}
ASSET_PREFIX = "/assets/"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidate each time; mostly the answer is 304
}


class Asset:
    """One file, and an ETag that changes with its content."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._type = _TYPES[name.rpartition(".")[2]]
        self.tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'

    def response(self, known_tag: str | None) -> Response:
        """Returns the file; 304 if the client already has it."""
        headers = {**HEADERS, "etag": self.tag}
        if known_tag == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._type, headers=headers)


def load_assets() -> dict[str, Asset]:
    """Returns all files by path."""
    found = dict(_assets_in(files(__package__).joinpath("static"), ASSET_PREFIX))
    for path, name in PAGES.items():
        found[path] = found.pop(f"{ASSET_PREFIX}{name}")
    return found


def _assets_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    """Yields the files of a folder and of its subfolders, by path."""
    for each in folder.iterdir():
        if each.is_dir():
            yield from _assets_in(each, f"{prefix}{each.name}/")
        elif each.name.rpartition(".")[2] in _TYPES:
            yield f"{prefix}{each.name}", Asset(each.name, each.read_bytes())
