import msgspec
import pytest

from bench.simulator.cluster import SimulatedPools
from bench.simulator.hardware import hardware_named
from bench.simulator.traces import Trace, TraceRequest
from bench.tiers.study import TiersPlan, study
from engine.errors import ConfigError

HARDWARE = msgspec.structs.replace(hardware_named("h200-qwen3-32b-tp2"), num_blocks=48)


def returning_trace(num_families=12, num_turns=3):
    """Prompts of 16 blocks; each returns when workers of 48 blocks have forgotten it."""
    ids = [tuple(range(100 * i, 100 * i + 16)) for i in range(num_families)] * num_turns
    requests = [TraceRequest(4.0 * i, 16 * 512, 4, each) for i, each in enumerate(ids)]
    return Trace("t", 512, tuple(requests))


def plan_of(**changes):
    sizes = {"memory_tokens": 4e5, "disk_tokens": 1e6, "take_bytes_per_s": 20e9}
    given = {**sizes, "node_workers": 2, **changes}
    return TiersPlan(returning_trace(), HARDWARE, SimulatedPools(1, 1), **given)


def test_sizes_are_those_of_all_stores_together():
    settings = plan_of(node_workers=1).settings()
    assert settings["none"] is None
    assert settings["memory"].memory_blocks == int(4e5 // 512 // 2)
    assert settings["memory"].disk_blocks == 0
    assert settings["disk"].disk_blocks == int(1e6 // 512 // 2)
    assert settings["small_memory"].memory_blocks == int(4e5 // 512 // 2) // 10
    assert settings["slow_intake"].take_bytes_per_s == 512 * 2**20


def test_sizes_of_no_block_are_refused():
    with pytest.raises(ConfigError):
        plan_of(memory_tokens=4e3).settings()


def test_study_finds_what_workers_have_forgotten_in_stores():
    said = []
    results = {result.name: result.value for result in study(plan_of(), said.append)}
    assert len(said) == 5
    assert results["memory/prefix/of_infinite"] > 0.9
    assert results["none/prefix/of_infinite"] < 0.5
    assert results["memory/ttft/mean"] < results["none/ttft/mean"]
    assert results["memory/store/hits/host"] > 0
    assert results["small_memory/store/hits/disk"] > 0
    assert "none/store/taken" not in results
    assert "memory/store/hits/disk" not in results
