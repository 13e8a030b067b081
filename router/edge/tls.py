"""The certificate files of a listener, reloaded when they change.

New files are used from the next handshake on. If a pair is unusable, for example written in part,
the last good pair stays in use.
"""

import logging
import os
import ssl
import stat
from collections import Counter
from pathlib import Path

from engine.errors import ConfigError

log = logging.getLogger(__name__)

_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO

PemTriple = tuple[bytes, bytes, bytes | None]  # certificate, its key, CA of client certificates
_Signature = tuple[tuple[int, int, int], ...]


class TlsError(ConfigError):
    """The certificate files cannot be used."""


class TlsFiles:
    """A certificate, its key, and optionally the CA of client certificates."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._context: ssl.SSLContext | None = None
        self._pem: PemTriple | None = None
        self._signature: _Signature | None = None
        self.counters: Counter[str] = Counter()

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS context for the next handshake."""
        assert self._context is not None, "not opened"
        return self._context

    @property
    def pem(self) -> "PemTriple":
        """The contents of the files in use, for libraries that do TLS themselves."""
        assert self._pem is not None, "not opened"
        return self._pem

    def open(self) -> None:
        """Reads the files. Raises TlsError."""
        self._signature = self._stat_files()
        self._context = self._load()

    def check(self) -> None:
        """Reloads the files if they have changed."""
        try:
            signature = self._stat_files()
            if signature == self._signature:
                return
            self._signature = signature
            self._context = self._load()
        except TlsError as error:
            self.counters["reload failed"] += 1
            log.error("the old certificate stays: %s", error)
        else:
            self.counters["reloaded"] += 1
            log.warning("%s was read again", self._certificate)

    def _stat_files(self) -> _Signature:
        return tuple(_signature(path) for path in self._paths)

    @property
    def _paths(self) -> list[Path]:
        paths = [self._certificate, self._key]
        return paths if self._client_ca is None else [*paths, self._client_ca]

    def _load(self) -> ssl.SSLContext:
        _check_private(self._key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password function, a prompt would block the loop.
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            certificate, key, *client_ca = (path.read_bytes() for path in self._paths)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            names = " and ".join(str(path) for path in self._paths)
            raise TlsError(f"{names} are no certificate with its key: {error}") from error
        self._pem = (certificate, key, client_ca[0] if client_ca else None)
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _signature(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def _check_private(key: Path) -> None:
    try:
        mode = os.stat(key).st_mode
    except OSError as error:
        raise TlsError(f"{key}: {error.strerror}") from error
    if mode & _FORBIDDEN_MODE:
        raise TlsError(
            f"{key}: others may read or change it (mode {stat.S_IMODE(mode):o});"
            " `chmod 600` mends that"
        )
