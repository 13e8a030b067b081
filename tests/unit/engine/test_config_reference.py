"""The reference has every key with its type, default and meaning; its page is up to date."""

import pytest

from engine.config import AdminConfig, Config, GatewayConfig, ModelConfig, WorkerConfig
from engine.config_reference import config_keys, reference_text, settings_of, toml_of
from tests.kits.tree.documents import ROOT

KEYS = {key.name: key for key in config_keys()}


def test_the_page_is_what_the_code_says():
    page = (ROOT / "docs/users/configuration.md").read_text()
    assert page == reference_text(), "run `baton config reference > docs/users/configuration.md`"


def test_every_key_has_a_meaning():
    assert [key.name for key in config_keys() if not key.meaning] == []


def test_every_field_is_a_key():
    sections = {name: getattr(Config(), name) for name in Config.__struct_fields__}
    del sections["models"]
    sections["models.NAME"] = ModelConfig("a model")
    assert list(KEYS) == [
        f"{s}.{f}" for s, part in sections.items() for f in part.__struct_fields__
    ]


@pytest.mark.parametrize(
    ("name", "kind", "default", "variable"),
    [
        ("worker.kv_mib", "integer or none", '"none"', "BATON_WORKER__KV_MIB"),
        ("gateway.cors_origins", "list of text", "[]", "BATON_GATEWAY__CORS_ORIGINS"),
        ("worker.decode_kv_dtype", "choice or none", '"none"', "BATON_WORKER__DECODE_KV_DTYPE"),
        ("router.policy", "choice", '"slo"', "BATON_ROUTER__POLICY"),
        ("pools.num_gpus", "number or none", '"none"', "BATON_POOLS__NUM_GPUS"),
        ("gateway.open_to_all", "true or false", "false", "BATON_GATEWAY__OPEN_TO_ALL"),
    ],
)
def test_keys_have_types_and_defaults(name, kind, default, variable):
    key = KEYS[name]
    assert (key.type, key.default, key.variable) == (kind, default, variable)


def test_meanings_join_the_comment_above_and_the_one_behind():
    assert KEYS["worker.step_timeout_s"].meaning.endswith("starts. none: no limit.")
    assert KEYS["worker.kv_mib"].meaning.startswith("Memory of the KV pool; none:")


def test_choices_have_their_values():
    values = KEYS["pools.placement"].values
    assert list(values) == ["pack", "spread"]
    assert "shared memory" in values["pack"]


def test_settings_say_what_is_no_default_and_hide_keys():
    config = Config(
        worker=WorkerConfig(kv_mib=64),
        gateway=GatewayConfig(api_key=(f"sha256:{'0' * 64}",)),
        admin=AdminConfig(key="secret"),
    )
    changed = {key.name: value for key, value, same in settings_of(config) if not same}
    assert changed == {
        "worker.kv_mib": "64",
        "gateway.api_key": '"(hidden)"',
        "admin.key": '"(hidden)"',
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, '"none"'),
        (True, "true"),
        ('a"b', '"a\\"b"'),
        (("a", "b"), '["a", "b"]'),
        (1.5, "1.5"),
    ],
)
def test_values_are_written_as_toml(value, text):
    assert toml_of(value) == text
