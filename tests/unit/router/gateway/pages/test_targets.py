"""Prometheus' HTTP service discovery."""

import pytest

from engine.errors import InvalidRequest
from router.gateway.pages.status import targets_of
from tests.kits.router.gateway import FakeRouter, get, make_app


def addresses(*urls: str, asked: str = "here:9") -> list[str]:
    return [group.targets[0] for group in targets_of(urls, "http", asked)]


def test_processes_of_a_port_are_one_target():
    assert addresses("http://10.0.0.1:8000", "http://10.0.0.1:8000", "http://10.0.0.2:80") == [
        "10.0.0.1:8000",
        "10.0.0.2:80",
    ]


def test_an_address_that_means_all_is_the_host_that_was_asked():
    assert addresses("http://0.0.0.0:8000", asked="gateway.example") == ["gateway.example:8000"]
    assert addresses("http://[::]:8000", asked="[::1]:7") == ["[::1]:8000"]


def test_the_scheme_is_a_label():
    (group,) = targets_of(["https://10.0.0.1:8000"], "http", "here")
    assert group.labels == {"__scheme__": "https", "__metrics_path__": "/metrics"}


@pytest.mark.parametrize("asked", ["", "a b", "x:port", "a/b", "http://a", "[::", "a" * 999])
def test_a_wrong_host_is_refused(asked):
    with pytest.raises(InvalidRequest, match="host is"):
        targets_of([], "http", asked)


def test_a_gateway_without_a_controller_names_itself():
    reply = get(make_app(FakeRouter()), "/metrics/targets", host="10.0.0.7:8000")
    assert reply.status == 200
    assert [group["targets"] for group in reply.json()] == [["10.0.0.7:8000"]]
    app = make_app(FakeRouter(), allowed_hosts=("*",))
    assert get(app, "/metrics/targets", host="a b").status == 400
