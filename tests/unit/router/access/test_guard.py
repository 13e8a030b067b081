"""Without API keys, a server answers only to host names that no web page can have."""

import pytest

from engine.config import GatewayConfig
from router.access.guard import is_own
from tests.kits.router.access import key_file
from tests.kits.router.gateway import FakeRouter, answer, get, make_app, post

OWN = (
    "localhost",
    "localhost:8000",
    "LOCALHOST.:8000",
    "my.localhost:1",
    "127.0.0.1",
    "127.0.0.1:8000",
    "10.1.2.3:80",
    "127.1",
    "2130706433",
    "0x7f000001:8000",
    "[::1]",
    "[::1]:8000",
    "[fe80::1%25eth0]:8000",
    "[::ffff:127.0.0.1]",
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil-localhost",
    "notlocalhost:8000",
    "localhost@evil.example",
    "localhost:80@evil.example",
    "rebind.127.0.0.1.nip.io",
    "[::1].evil.example",
    "baton.lan.evil.example",
    "xbaton.lan",
    "\xff",
)


@pytest.mark.parametrize("host", OWN)
def test_localhost_and_addresses_are_own(host):
    assert is_own(host, frozenset())


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not(host):
    assert not is_own(host, frozenset({"baton.lan", "*.corp.example"}))


@pytest.mark.parametrize(
    "host", ["baton.lan", "Baton.LAN.:80", "a.corp.example", "b.a.corp.example"]
)
def test_configured_names_are_own(host):
    assert is_own(host, frozenset({"baton.lan", "*.corp.example"}))
    assert is_own(host, frozenset({"*"}))


@pytest.mark.parametrize("path", ["/dashboard/state", "/v1/models", "/metrics", "/health", "/docs"])
def test_a_page_that_rebinds_its_name_reads_nothing(path):
    app = make_app(FakeRouter())
    assert get(app, path, host="127.0.0.1:8000").status == 200
    refused = get(app, path, host="evil.example:8000")
    assert refused.status == 403
    error = refused.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "gateway.allowed_hosts" in error["message"]


def test_a_page_that_rebinds_its_name_asks_nothing():
    router = FakeRouter(answer("hi"))
    app = make_app(router, allowed_hosts=("baton.lan",))
    body = {"prompt": "yo"}
    assert post(app, "/v1/completions", body, host="evil.example").status == 403
    assert router.requests == []
    for host in ("baton.lan:8000", "localhost"):
        assert post(app, "/v1/completions", body, host=host).status == 200


def test_with_keys_any_name_is_taken(tmp_path):
    app = make_app(FakeRouter(), keys=key_file(tmp_path / "keys", "k"))
    asked = {"host": "evil.example", "authorization": "Bearer k"}
    assert get(app, "/v1/models", **asked).status == 200
    assert get(app, "/v1/models", host="evil.example").status == 401


@pytest.mark.parametrize("host", ["", "Name", "a.b:80", "http://a", "a/b", "*.*", "*a", "a b"])
def test_a_name_that_no_request_can_have_is_an_error(host):
    with pytest.raises(ValueError, match=r"gateway\.allowed_hosts"):
        GatewayConfig(allowed_hosts=(host,))
