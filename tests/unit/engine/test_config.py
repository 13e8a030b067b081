"""One configuration from file, environment and flags. Errors name the wrong setting."""

import re
from hashlib import sha256
from types import NoneType
from typing import get_args, get_type_hints

import pytest

from engine.config import Config, GatewayConfig, RouterConfig, Transport, WorkerConfig, load_config
from engine.errors import ConfigError
from engine.layout import KVFormat


@pytest.fixture
def write(tmp_path):
    def write_file(text: str):
        path = tmp_path / "baton.toml"
        path.write_text(text)
        return path

    return write_file


def load(path=None, environment=None, flags=None) -> Config:
    return load_config(path, environment or {}, flags or {})


def test_without_any_source_the_defaults_hold():
    assert load() == Config() == Config(WorkerConfig(), RouterConfig(), GatewayConfig())


def test_a_file_sets_only_the_settings_it_names(write):
    config = load(write("[worker]\nkv_mib = 64\n[gateway]\nkeys_file = '/k'\n"))
    assert config.worker == WorkerConfig(kv_mib=64)
    assert config.gateway == GatewayConfig(keys_file="/k")
    assert config.router == RouterConfig()


def test_the_environment_overrides_the_file_and_flags_override_both(write):
    path = write("[worker]\nkv_mib = 1\nblock_size = 1\nchunk_tokens = 1\n")
    environment = {"BATON_WORKER__BLOCK_SIZE": "2", "BATON_WORKER__CHUNK_TOKENS": "2"}
    worker = load(path, environment, {"worker.chunk_tokens": 3}).worker
    assert (worker.kv_mib, worker.block_size, worker.chunk_tokens) == (1, 2, 3)


@pytest.mark.parametrize("path", ["", "keys.json", "./keys.json"])
def test_a_keys_file_that_depends_on_the_working_directory_is_an_error(path):
    with pytest.raises(ConfigError, match="absolute path"):
        load(environment={"BATON_GATEWAY__KEYS_FILE": path})


@pytest.mark.parametrize("text", ["secret", '["secret"]'])
def test_keys_are_kept_as_hashes(text):
    config = load(environment={"BATON_GATEWAY__API_KEY": text})
    assert config.gateway.key_hashes == (sha256(b"secret").hexdigest(),)
    assert "secret" not in repr(config)
    assert config.gateway.needs_key


def test_a_hash_stands_for_its_key(write):
    digest = sha256(b"b").hexdigest()
    path = write(f"[gateway]\nhost = '0.0.0.0'\napi_key = ['a', 'sha256:{digest}', 'b']\n")
    assert load(path).gateway.key_hashes == (sha256(b"a").hexdigest(), digest)


@pytest.mark.parametrize("key", ["", "two words", "key\n", "schlüssel", "k" * 257])
def test_a_key_that_no_header_can_have_is_refused_without_showing_it(key):
    with pytest.raises(ConfigError, match="printable ASCII characters") as caught:
        load(flags={"gateway.api_key": [key]})
    assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize("value", [3, [3], {"a": "b"}])
def test_keys_of_other_types_are_errors(value):
    with pytest.raises(ConfigError, match=r"gateway\.api_key"):
        load(flags={"gateway.api_key": value})


def test_keys_of_the_operator_and_a_keys_file_do_not_go_together():
    with pytest.raises(ConfigError, match="do not go together"):
        load(flags={"gateway.api_key": "k", "gateway.keys_file": "/k"})


def test_environment_values_take_the_type_of_their_setting():
    environment = {
        "BATON_WORKER__KV_DTYPE": "bf16",
        "BATON_WORKER__KV_WIRE_DTYPE": "int8",
        "BATON_WORKER__KV_TRANSPORT": "nixl",
        "BATON_WORKER__THREADS": "3",
        "BATON_ROUTER__QUEUE_TIMEOUT_S": "1.5",
        "BATON_GATEWAY__MODEL_NAME": "7",
    }
    config = load(environment=environment)
    assert config.worker.kv_dtype is KVFormat.BF16
    assert config.worker.kv_wire_dtype is KVFormat.INT8
    assert config.worker.kv_transport is Transport.NIXL
    assert config.worker.threads == 3
    assert config.router.queue_timeout_s == 1.5
    assert config.gateway.model_name == "7"


def test_a_variable_holds_a_list_as_toml_writes_it():
    environment = {"BATON_GATEWAY__CORS_ORIGINS": '["https://a.example", "http://localhost:3000"]'}
    origins = load(environment=environment).gateway.cors_origins
    assert origins == ("https://a.example", "http://localhost:3000")
    with pytest.raises(ConfigError, match="cors_origins"):
        load(environment={"BATON_GATEWAY__CORS_ORIGINS": "[https"})


@pytest.mark.parametrize("origin", ["*", "http://[::1]:3000", "chrome-extension://abc"])
def test_origins_of_pages_may_be_of_any_scheme(origin):
    assert GatewayConfig(cors_origins=(origin,)).cors_origins == (origin,)


@pytest.mark.parametrize("origin", ["", "a.example", "https://a.example/", "https://A.example"])
def test_an_origin_that_no_browser_sends_is_an_error(origin):
    with pytest.raises(ValueError, match="an origin is SCHEME://HOST"):
        GatewayConfig(cors_origins=(origin,))


def test_other_variables_are_left_alone():
    environment = {"PATH": "/bin", "BATON_TOKEN": "x", "OTHER__KV_MIB": "3", "baton_worker__x": ""}
    assert load(environment=environment) == Config()


def test_a_flag_that_is_not_given_changes_nothing():
    environment = {"BATON_WORKER__KV_MIB": "64"}
    assert load(environment=environment, flags={"worker.kv_mib": None}).worker.kv_mib == 64


def _settings(*, may_be_none: bool) -> list[tuple[str, str]]:
    return [
        (section, name)
        for section, part in get_type_hints(Config).items()
        if section != "models"
        for name, kind in get_type_hints(part).items()
        if (NoneType in get_args(kind)) is may_be_none
    ]


@pytest.mark.parametrize(("section", "name"), _settings(may_be_none=True))
def test_none_unsets_every_key_that_may_be_unset(write, section, name):
    path = write(f'[{section}]\n{name} = "none"\n')
    for config in (load(path), load(environment={f"BATON_{section}__{name}".upper(): "none"})):
        assert getattr(getattr(config, section), name) is None


@pytest.mark.parametrize(("section", "name"), _settings(may_be_none=False))
def test_none_unsets_no_key_that_needs_a_value(section, name):
    try:
        config = load(flags={f"{section}.{name}": "none"})
    except ConfigError:
        return
    assert getattr(getattr(config, section), name) is not None


MODELS = """
[worker]
kv_mib = 64
threads = 2

[models.small]
model = "a/small"
idle_s = 5

[models.small.worker]
kv_mib = 32
threads = "none"
"""


def test_a_models_workers_have_the_settings_of_all_workers_but_their_own(write):
    config = load(write(MODELS), environment={"BATON_WORKER__MAX_RUNNING": "8"})
    small = config.models["small"]
    assert (small.model, small.idle_s, small.mixed) == ("a/small", 5.0, 0)
    assert (small.worker.kv_mib, small.worker.threads, small.worker.max_running) == (32, None, 8)
    assert (config.worker.kv_mib, config.worker.threads) == (64, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[models.small]", "missing required field `model`"),
        ('[models.small]\nmodel = "a"\nidel_s = 1', "did you mean models.NAME.idle_s"),
        (
            '[models.small]\nmodel = "a"\nidle_s = 0',
            "Expected `float` > 0.0 - at `$.models[...].idle_s`",
        ),
        ('[models."a b"]\nmodel = "a"', "'a b' must have 1 to 64 letters"),
        ("[models]\nsmall = 1", "Expected `object`"),
        ('[models.small]\nmodel = "a"\nworker = 1', "Expected `object`"),
        ("".join(f'[models.m{n}]\nmodel = "a"\n' for n in range(17)), "at most 16 models"),
    ],
)
def test_wrong_models_are_refused(write, text, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load(write(text))


@pytest.mark.parametrize("value", ["", "None", 0, False])
def test_only_none_switches_off(value):
    with pytest.raises(ConfigError, match="step_timeout_s"):
        load(flags={"worker.step_timeout_s": value})


def test_flags_may_have_the_type_of_the_setting():
    config = load(flags={"worker.kv_dtype": KVFormat.BF16, "gateway.port": 0})
    assert (config.worker.kv_dtype, config.gateway.port) == (KVFormat.BF16, 0)


# ---------------------------------------------------------------- names of wrong settings


@pytest.mark.parametrize("name", ["worker.kv_mb", "wrker.kv_mib", "worker.threads.count"])
def test_an_unknown_key_is_named_for_every_source(name, write):
    section, _, key = name.partition(".")
    variable = f"BATON_{section}__{key.replace('.', '__')}".upper()
    with pytest.raises(ConfigError, match=r"kv_mb|wrker|threads"):
        load(environment={variable: "64"})
    with pytest.raises(ConfigError, match=r"kv_mb|wrker|threads"):
        load(flags={name: 64})
    with pytest.raises(ConfigError, match=r"kv_mb|wrker|threads"):
        load(write(f"[{section}]\n{key} = 64\n"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.kv_mib", "much"),
        ("worker.kv_mib", 1.5),
        ("worker.kv_mib", [1]),
        ("worker.kv_dtype", "fp64"),
        ("worker.decode_kv_dtype", "fp64"),
        ("worker.kv_wire_dtype", "fp13"),
        ("worker.kv_transport", "carrier pigeon"),
        ("worker.threads", "all"),
        ("router.queue_timeout_s", "soon"),
        ("gateway.keys_file", 3),
        ("gateway.port", "http"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(key, value):
    with pytest.raises(ConfigError, match=rf"\$\.{re.escape(key)}"):
        load(flags={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.block_size", 0),
        ("worker.kv_mib", -1),
        ("worker.max_model_len", 0),
        ("worker.max_batch_tokens", 0),
        ("worker.chunk_tokens", 0),
        ("worker.max_running", 0),
        ("worker.threads", 0),
        ("router.max_queue", 0),
        ("router.queue_timeout_s", 0.0),
        ("router.progress_timeout_s", -1.0),
        ("router.slowest_prefill_tokens_per_s", float("nan")),
        ("router.max_attempts", 0),
        ("router.prefill_backlog_tokens", 0),
        ("gateway.port", -1),
        ("gateway.port", 65536),
        ("gateway.max_body_bytes", 0),
    ],
)
def test_a_value_that_makes_no_sense_is_named(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        load(flags={key: value})


def test_a_batch_must_have_room_for_all_decoding_sequences():
    with pytest.raises(ConfigError, match=r"worker\.max_running.*worker\.max_batch_tokens"):
        load(flags={"worker.max_running": 65, "worker.max_batch_tokens": 64})


def test_a_section_that_is_a_value_is_an_error(write):
    with pytest.raises(ConfigError, match="worker"):
        load(write("worker = 3\n"))
    with pytest.raises(ConfigError, match=r"worker\.kv_mib"):
        load(write("worker = 3\n"), {"BATON_WORKER__KV_MIB": "64"})


def test_a_file_that_is_missing_or_a_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        load(tmp_path)


def test_a_file_that_is_not_toml_is_named(write):
    with pytest.raises(ConfigError, match=r"baton\.toml: .*line 1"):
        load(write("worker = {\n"))


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"baton\.toml"):
        load(path)


def test_the_policy_must_be_a_known_one():
    assert load(environment={"BATON_ROUTER__POLICY": "round-robin"}).router.policy == "round-robin"
    assert load(flags={"router.slo_ttft_s": 2.5}).router.slo_ttft_s == 2.5
    with pytest.raises(ConfigError, match="policy"):
        load(flags={"router.policy": "best"})
    with pytest.raises(ConfigError, match=r"\$\.router\.slo_tpot_s"):
        load(flags={"router.slo_tpot_s": 0})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_a_reachable_gateway_needs_keys_or_open_to_all(host):
    with pytest.raises(ValueError, match=r"no key is needed: make one with `baton keys add NAME`"):
        GatewayConfig(host=host)
    GatewayConfig(host=host, keys_file="/k")
    GatewayConfig(host=host, open_to_all=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_gateway_needs_no_keys(host):
    GatewayConfig(host=host)


@pytest.mark.parametrize(
    "fields",
    [
        {"tls_cert": "/c"},
        {"tls_key": "/k"},
        {"tls_client_ca": "/a"},
        {"tls_cert": "c", "tls_key": "/k"},
    ],
)
def test_tls_needs_both_files_by_absolute_path(fields):
    with pytest.raises(ValueError, match=r"gateway\.tls_"):
        GatewayConfig(**fields)
