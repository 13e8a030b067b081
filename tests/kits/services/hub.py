"""A model hub on loopback with the part of the HTTP API that downloads use."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

NAME = "org/tiny"


@dataclass(slots=True)
class Hub:
    """One model with branches. `requests` has the path of each HTTP request."""

    url: str
    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)  # files by commit id
    branches: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut_after_bytes: int | None = None  # bytes of a file's body after which the connection closes

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit and returns its id."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def num_downloads(self, name: str) -> int:
        return sum(path == f"GET {name}" for path in self.requests)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        resolve = f"/{NAME}/resolve/"
        if path.startswith(f"/api/models/{NAME}"):
            self._api(path.removeprefix(f"/api/models/{NAME}").strip("/").split("/", 1))
        elif path.startswith(resolve):
            revision, _, name = path.removeprefix(resolve).partition("/")
            self._file(revision, name)
        else:
            self._json({"error": "Repository not found"}, 404, "RepoNotFound")

    def _api(self, what):
        kind, revision = what if len(what) == 2 else ("revision", "main")
        commit = self.hub.branches.get(revision, revision)
        files = self.hub.commits.get(commit)
        if files is None:
            return self._json({"error": f"Invalid rev id: {revision}"}, 404, "RevisionNotFound")
        if kind == "tree":
            return self._json([_entry(name, body) for name, body in files.items()])
        siblings = [
            {"rfilename": name, "size": len(body), "blobId": _blob(body)}
            for name, body in files.items()
        ]
        return self._json({"id": NAME, "sha": commit, "siblings": siblings})

    def _file(self, revision, name):
        body = self.hub.commits[self.hub.branches.get(revision, revision)][name]
        self.hub.requests.append(f"{self.command} {name}")
        self.send_response(200)
        self.send_header("X-Repo-Commit", self.hub.branches.get(revision, revision))
        self.send_header("ETag", f'"{_blob(body)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: self.hub.cut_after_bytes])
            if self.hub.cut_after_bytes is not None:
                self.close_connection = True

    def _json(self, value, status=200, code=None):
        body = json.dumps(value).encode()
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hub() -> Iterator[Hub]:
    served = Hub("")
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": served})
    ) as server:
        served.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def _entry(name: str, body: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(body), "oid": _blob(body)}


def _blob(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
