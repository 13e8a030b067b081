"""HTTPS at a real gateway: streams, new certificates without a restart, handshake timeouts."""

import contextlib
import os
import socket
import ssl
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.base.defaults import BUNDLED_MODEL
from deploy.local.deployment import Deployment
from engine.clock import MonotonicClock
from engine.config import Config, GatewayConfig, PoolsConfig
from router.edge.tls import TlsError, TlsFiles
from tests.kits.certificates import make_certificate, needs_openssl
from tests.kits.services.cluster import NURSERY
from tests.kits.services.null_workers import NullWorkers
from tests.kits.services.served import poll_until

pytestmark = needs_openssl

HANDSHAKE_TIMEOUT_S = 0.5
BODY = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": True}


@dataclass(slots=True)
class Secure:
    """A running gateway and its certificate files."""

    url: httpx.URL
    certificate: Path
    key: Path

    def trusting(self, certificate: Path) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(certificate))

    def served_name(self) -> str:
        """Returns the name in the certificate that a new connection receives."""
        pem = ssl.get_server_certificate((self.url.host, self.url.port), timeout=10)
        return next((n for n in NAMES if (FOLDERS[n] / "cert.pem").read_text() in pem + "\n"), "")


NAMES = ("first", "second")
FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    for name in NAMES:
        FOLDERS[name] = folder / name
        make_certificate(folder / name, name)
    certificate, key = folder / "cert.pem", folder / "key.pem"
    put(certificate, FOLDERS["first"] / "cert.pem")
    put(key, FOLDERS["first"] / "key.pem")
    gateway = GatewayConfig(
        port=0, tls_cert=str(certificate), tls_key=str(key), head_timeout_s=HANDSHAKE_TIMEOUT_S
    )
    config = Config(gateway=gateway, pools=PoolsConfig(mixed=1))
    running = Deployment(NullWorkers(NURSERY), model=BUNDLED_MODEL, config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_RUN_DIR", str(folder / "run"))
        running.open()
        yield Secure(httpx.URL(running.gateways[0].url), certificate, key)
        running.close()


def put(path: Path, source: Path) -> None:
    """Moves a copy of a file into place atomically."""
    partial = path.with_suffix(".new")
    partial.write_bytes(source.read_bytes())
    partial.chmod(0o600)
    partial.replace(path)


def test_streams_and_new_certificates_without_a_restart(secure):
    assert secure.url.scheme == "https"
    with httpx.Client(verify=secure.trusting(FOLDERS["first"] / "cert.pem"), timeout=10) as client:
        answer = client.post(f"{secure.url}/v1/completions", json=BODY).text
        assert answer.endswith("data: [DONE]\n\n")
        assert secure.served_name() == "first"

        put(secure.certificate, FOLDERS["second"] / "cert.pem")  # the matching key is copied later
        page = f"{secure.url}/metrics"
        poll_until(
            lambda: 'event="reload failed"' in client.get(page).text, "the gateway tried the files"
        )
        assert secure.served_name() == "first"
        put(secure.key, FOLDERS["second"] / "key.pem")
        poll_until(lambda: secure.served_name() == "second", "the new certificate is served")
        # the old connection still works
        assert client.get(f"{secure.url}/health").status_code == 200
    with httpx.Client(verify=secure.trusting(FOLDERS["second"] / "cert.pem")) as client:
        assert client.get(f"{secure.url}/health").status_code == 200


def test_handshakes_that_do_not_come_are_ended_in_time(secure):
    clock = MonotonicClock()
    begin_s = clock.now_s()
    address = (secure.url.host, secure.url.port)
    for hello in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(hello)
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in sock.recv(4096)
    assert clock.now_s() - begin_s < 5


def test_old_versions_of_tls_are_refused(secure):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with warnings.catch_warnings(action="ignore"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection((secure.url.host, secure.url.port), timeout=10) as sock,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(sock)


def test_a_key_that_others_may_read_is_refused(tmp_path):
    certificate, key = make_certificate(tmp_path, "leaky")
    TlsFiles(certificate, key).open()
    key.chmod(0o644)
    with pytest.raises(TlsError, match=r"others may read or change it \(mode 644\)"):
        TlsFiles(certificate, key).open()


def test_invalid_certificate_files_are_refused(tmp_path):
    certificate, key = make_certificate(tmp_path, "one")
    with pytest.raises(TlsError, match="No such file"):
        TlsFiles(tmp_path / "none.pem", key).open()
    certificate.write_text("nothing")
    with pytest.raises(TlsError, match="no certificate with its key"):
        TlsFiles(certificate, key).open()


def test_a_change_of_the_time_stamp_alone_reloads_the_files(tmp_path):
    certificate, key = make_certificate(tmp_path, "one")
    files = TlsFiles(certificate, key)
    files.open()
    before = files.context
    files.check()
    assert files.context is before
    os.utime(certificate, ns=(1, 1))
    files.check()
    assert files.context is not before
    assert files.counters == {"reloaded": 1}
