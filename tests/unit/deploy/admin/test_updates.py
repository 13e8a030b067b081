"""An update changes only what its file names."""

import pytest

from deploy.admin import declared
from deploy.admin.schema import PoolCounts, UpdateBody
from deploy.commands.versions import read_update
from engine.config import DeviceKind, Speculate, WorkerConfig
from engine.control import Intent, Pools, Version
from engine.errors import ConfigError
from engine.layout import KVFormat

NOW = WorkerConfig(kv_dtype=KVFormat.INT8, kv_mib=64, max_running=8, speculate=Speculate.NGRAM)
INTENT = Intent((Version(model="m", model_name="tiny", worker=NOW, pools=Pools(2, 1)),))


def order_of(body, intent):
    return declared.order_of(body, intent, lambda worker: DeviceKind.CPU)


def written(tmp_path, text, name="new.toml"):
    path = tmp_path / name
    path.write_text(text)
    return read_update(path)


def test_omitted_worker_settings_stay(tmp_path):
    version = order_of(
        written(tmp_path, '[worker]\nkv_mib = 128\nweights = "int8"'), INTENT
    ).version
    assert version.worker.kv_mib == 128
    assert version.worker.weights == "int8"
    assert (version.worker.kv_dtype, version.worker.max_running) == (KVFormat.INT8, 8)
    assert version.worker.speculate is Speculate.NGRAM
    assert (version.model, version.model_name, version.pools) == ("m", "tiny", Pools(2, 1))


def test_setting_can_return_to_its_default(tmp_path):
    body = written(tmp_path, '[worker]\nspeculate = "off"')
    assert order_of(body, INTENT).version.worker.speculate is Speculate.OFF


@pytest.mark.parametrize("text", ["", "[worker]", "[router]\nmax_queue = 3"])
def test_file_without_version_settings_changes_nothing(tmp_path, text):
    body = written(tmp_path, text)
    assert body == UpdateBody()
    assert order_of(body, INTENT).version.worker == NOW


def test_cluster_file_is_accepted_for_an_update(tmp_path):
    pytest.importorskip("yaml")
    text = "address: auto\npools: {prefill: 3, decode: 2}\nworker: {kv_mib: 128}\n"
    body = written(tmp_path, text, "baton.yaml")
    assert body == UpdateBody(worker={"kv_mib": 128}, pools=PoolCounts(3, 2, 0))
    assert order_of(body, INTENT).version.model == "m"
    assert written(tmp_path, text + "model: hf://a/b\n", "baton.yaml").model == "hf://a/b"


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"max_batch_tokens": 4}, "max_running must not exceed"),
        ({"kv_mb": 4}, "unknown field `kv_mb`"),
        ({"kv_mib": "many"}, r"Expected `int \| null`, got `str`"),
    ],
)
def test_incompatible_changes_are_refused(worker, reason):
    with pytest.raises(ConfigError, match=reason):
        order_of(UpdateBody(worker=worker), INTENT)


MODELS = """
[worker]
kv_mib = 64

[models.small]
model = "/data/small"
mixed = 2

[models.small.worker]
kv_dtype = "int8"
"""


def test_a_file_is_read_for_the_model_that_is_updated(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text(MODELS)
    body = read_update(path, "small")
    assert (body.model, body.pools) == ("/data/small", PoolCounts(0, 0, 2))
    assert body.worker is not None
    assert (body.worker["kv_mib"], body.worker["kv_dtype"]) == (64, "int8")
    assert read_update(path).worker == {"kv_mib": 64}
    with pytest.raises(ConfigError, match="no model is called 'large'; there are: small"):
        read_update(path, "large")


def test_a_version_of_another_model_follows_that_models_current_one():
    small = Version("small-v1", "/data/small", "small", pools=Pools(0, 0, 2), line="small")
    intent = Intent((Version(), small))
    order = order_of(UpdateBody(of="small"), intent)
    assert (order.version.name, order.version.line) == ("small-v2", "small")
    assert (order.version.model, order.version.pools) == ("/data/small", Pools(0, 0, 2))
    assert order_of(UpdateBody(), intent).version.name == "v2"
    with pytest.raises(ConfigError, match="there are: small"):
        order_of(UpdateBody(of="large"), intent)
