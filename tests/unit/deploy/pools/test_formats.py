"""KV formats between which KV can be transferred, and formats that are refused."""

from pathlib import Path

import pytest

from deploy.local.deployment import Deployment
from deploy.local.launcher import ProcessLauncher
from deploy.pools.formats import check_formats, config_of, stretch_of
from deploy.worker.host import served_as
from engine.config import Config, DeviceKind, PoolsConfig, WorkerConfig
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import Role

FP32, BF16, FP8 = KVFormat.FP32, KVFormat.BF16, KVFormat.FP8_E4M3
INT8, INT4 = KVFormat.INT8, KVFormat.INT4
CPU = DeviceKind.CPU
PAIR = (Role.PREFILL, Role.DECODE)
ALL = (*PAIR, Role.MIXED)


def configs(prefill, decode=None, wire=None, roles=PAIR):
    config = WorkerConfig(kv_dtype=prefill, decode_kv_dtype=decode, kv_wire_dtype=wire)
    return {role: config_of(role, config, CPU) for role in roles}


def test_decode_workers_may_hold_kv_in_another_format():
    formats = {role: c.kv_dtype for role, c in configs(FP32, INT8, roles=ALL).items()}
    assert formats == {Role.PREFILL: FP32, Role.DECODE: INT8, Role.MIXED: FP32}


def test_decode_workers_use_the_common_kv_format_by_default():
    assert {c.kv_dtype for c in configs(BF16, roles=ALL).values()} == {BF16}


@pytest.mark.parametrize(
    ("formats", "allowed"),
    [
        ((FP32,), True),
        ((INT8,), True),
        ((FP32, FP32, FP32), True),
        ((INT8, None, INT8), True),
        # the transfer loses no bits, but the source computes with fewer bits
        ((BF16, FP32), False),
        ((FP32, INT8, INT8), False),
        ((INT8, FP32, INT8), False),
        ((FP32, None, INT8), False),  # KV that is handed over was rounded and then widened
    ],
)
def test_pools_are_fluid_only_if_computed_kv_equals_handed_over_kv(formats, allowed):
    names = ("kv_dtype", "decode_kv_dtype", "kv_wire_dtype")
    config = WorkerConfig(**dict(zip(names, formats, strict=False)))
    assert stretch_of(config, CPU, PoolsConfig(stretch=3.0)) == (3.0 if allowed else None)


@pytest.mark.parametrize(
    ("decode", "allowed"), [({}, True), ({"decode_tp": 2}, True), ({"decode_tp": 1}, False)]
)
def test_pools_are_fluid_only_if_both_are_split_into_ranks_in_the_same_way(decode, allowed):
    config = WorkerConfig(tp=2, **decode)
    assert stretch_of(config, CPU, PoolsConfig(stretch=3.0)) == (3.0 if allowed else None)


def test_operator_can_put_walls_between_the_pools():
    assert stretch_of(WorkerConfig(), CPU, PoolsConfig(fluid=False)) is None


@pytest.mark.parametrize(
    ("prefill", "decode", "wire"),
    [
        (FP32, None, None),
        (INT4, None, None),
        (BF16, FP32, None),
        (FP32, None, INT8),
        (FP32, INT8, INT8),
        (BF16, FP8, FP8),
        (INT8, FP32, INT8),
        (FP32, BF16, BF16),
    ],
)
def test_compatible_formats_are_accepted(prefill, decode, wire):
    check_formats(configs(prefill, decode, wire))


BOTH = "--kv-dtype {} and --decode-kv-dtype {}"


@pytest.mark.parametrize(
    ("formats", "flags", "wire", "possible"),
    [
        ((FP32, INT8, None), BOTH.format("fp32", "int8"), "without --kv-wire-dtype", "int8"),
        ((FP8, FP32, INT8), BOTH.format("fp8_e4m3", "fp32"), "with --kv-wire-dtype int8", FP8),
        ((INT8, INT4, INT4), BOTH.format("int8", "int4"), "with --kv-wire-dtype int4", "none"),
        ((INT8, None, INT4), "--kv-dtype int8", "with --kv-wire-dtype int4", "int8"),
    ],
)
def test_incompatible_formats_are_refused_with_their_flags(formats, flags, wire, possible):
    with pytest.raises(ConfigError) as caught:
        check_formats(configs(*formats))
    assert str(caught.value) == f"{flags} cannot be combined {wire}; possible are: {possible}"


def test_formats_of_absent_roles_are_not_checked():
    check_formats(configs(FP32, INT8, roles=(Role.MIXED,)))


def test_wrong_formats_refuse_a_deployment_before_any_start(monkeypatch):
    launcher = ProcessLauncher()
    monkeypatch.setattr(launcher, "open", lambda: pytest.fail("something was started"))
    config = Config(WorkerConfig(decode_kv_dtype=INT8))
    deployment = Deployment(launcher, model=Path.cwd(), config=config)
    with pytest.raises(ConfigError, match="--kv-wire-dtype"):
        deployment.open()


def test_fingerprint_differs_by_wire_format():
    assert served_as("model", None) == "model"
    assert len({served_as("model", wire) for wire in (None, *KVFormat)}) == 1 + len(KVFormat)


def test_decode_workers_may_have_other_ranks():
    config = WorkerConfig(tp=2, ep=2, decode_tp=4, decode_pp=2, decode_ep=1)
    found = {
        role: (c.tp, c.pp, c.ep) for role in ALL for c in [config_of(role, config, DeviceKind.CPU)]
    }
    assert found == {Role.PREFILL: (2, 1, 2), Role.DECODE: (4, 2, 1), Role.MIXED: (2, 1, 2)}
