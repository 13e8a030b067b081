import json
import math
from pathlib import Path
from random import Random

import pytest

from bench.client.load import SloBounds
from bench.planner.load import (
    ExpectedLoad,
    colocated,
    disaggregated,
    floor_of,
    prefill_mean_s,
    wait_p90_s,
    workload,
)
from bench.planner.model import MODELS, model_named, read_model
from bench.planner.pricing import (
    GPUS,
    ModelOptions,
    Platform,
    Speculation,
    check_profile,
    worker_of,
)
from bench.simulator.goodput import infinite_cache_hits
from bench.simulator.hardware import PROFILES
from engine.config import WeightFormat
from engine.errors import CheckpointError, ConfigError
from engine.layout import KVFormat

BUNDLED = Path(__file__).parents[4] / "engine" / "model" / "bundled" / "target"
H200 = Platform("h200", GPUS["h200"], None, 3.0)
A100 = Platform("a100", GPUS["a100"], None, 1.5)
QWEN3_8B = MODELS["qwen3-8b"]


def worker(model="qwen3-8b", platform=H200, options=ModelOptions(), *, ranks=1, block_size=128):  # noqa: B008
    return worker_of(MODELS[model], platform, options, ranks=ranks, block_size=block_size)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "kibibytes"),
    [("llama-3.1-70b", 320), ("qwen3-32b", 256), ("qwen3-8b", 144), ("llama-3.1-8b", 128)],
)
def test_bf16_kv_of_a_token_matches_the_model(name, kibibytes):
    assert MODELS[name].kv_token_bytes(KVFormat.BF16) == kibibytes * 1024


@pytest.mark.parametrize(
    ("kv_format", "bytes_of_a_head"),
    [(KVFormat.FP8_E4M3, 132), (KVFormat.INT8, 132), (KVFormat.INT4, 68), (KVFormat.FP32, 512)],
)
def test_kv_formats_count_their_scales(kv_format, bytes_of_a_head):
    heads = 2 * QWEN3_8B.layers * QWEN3_8B.kv_heads
    assert QWEN3_8B.kv_token_bytes(kv_format) == heads * bytes_of_a_head


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
    ],
)
def test_weights_match_the_model_card(name, billions):
    assert MODELS[name].num_weights / 1e9 == pytest.approx(billions, rel=1e-3)


def test_only_the_layers_are_quantised():
    held = {weights: QWEN3_8B.held_bytes(weights) for weights in (WeightFormat.BF16, "fp8")}
    assert held[WeightFormat.BF16] - held["fp8"] == QWEN3_8B.layer_weights
    assert QWEN3_8B.held_bytes(WeightFormat.INT8) == held["fp8"]


def test_config_weights_match_the_checkpoint_files():
    model = read_model(BUNDLED)
    header_len = int.from_bytes((BUNDLED / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((BUNDLED / "model.safetensors").read_bytes()[8 : 8 + header_len])
    shapes = [t["shape"] for name, t in header.items() if name != "__metadata__"]
    assert model.num_weights == sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    assert (model.kv_heads, model.head_dim, model.tied) == (2, 64, True)


def test_missing_config_fields_have_usual_defaults(tmp_path):
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    model = model_named(str(tmp_path))
    assert (model.kv_heads, model.head_dim, model.tied) == (4, 16, False)
    assert model.num_weights == 2 * (4 * 64 * 64 + 3 * 64 * 96) + 2 * 6400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_config_of_another_architecture_is_an_error(tmp_path, change, message):
    config = json.loads((BUNDLED / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("profile", "model", "ranks"),
    [
        ("h200-qwen3-8b", "qwen3-8b", 1),
        ("h200-qwen3-32b-tp2", "qwen3-32b", 2),
        ("h200-llama-3.1-70b-tp8", "llama-3.1-70b", 8),
    ],
)
def test_the_roofline_is_near_the_measured_profiles(profile, model, ranks):
    measured, ours = PROFILES[profile], worker(model, ranks=ranks).hardware
    assert ours.prefill.seconds(4096) == pytest.approx(measured.prefill.seconds(4096), rel=0.15)
    assert ours.decode.seconds(1, 2048) == pytest.approx(measured.decode.seconds(1, 2048), rel=0.2)
    assert ours.decode.seconds(64, 64 * 2048) == pytest.approx(
        measured.decode.seconds(64, 64 * 2048), rel=0.25
    )


def test_kv_memory_is_the_memory_that_the_weights_leave():
    eight = worker()
    left = 0.9 * (141e9 - 2 * QWEN3_8B.num_weights)
    assert eight.kv_tokens == pytest.approx(left / (144 * 1024), abs=128)
    assert worker("llama-3.1-70b") is None
    assert worker("llama-3.1-70b", ranks=2) is not None


def test_a_profile_without_options_keeps_its_prices_and_its_memory():
    profile = PROFILES["h200-qwen3-32b-tp2"]
    platform = Platform(profile.name, None, profile, 3.0)
    ours = worker("qwen3-32b", platform, ranks=2, block_size=512).hardware
    assert (ours.prefill, ours.decode, ours.gpus) == (profile.prefill, profile.decode, 2)
    assert ours.num_blocks in (profile.num_blocks - 1, profile.num_blocks)


def test_a_profile_of_another_model_is_an_error():
    with pytest.raises(ConfigError, match="h200-qwen3-8b"):
        check_profile(MODELS["qwen3-32b"], PROFILES["h200-qwen3-8b"])
    check_profile(QWEN3_8B, PROFILES["h200-qwen3-8b"])


def test_weights_of_8_bits_are_read_in_half_the_time_and_multiplied_in_half():
    plain, eight = worker().hardware, worker(options=ModelOptions(WeightFormat.FP8)).hardware
    read = QWEN3_8B.read_bytes(WeightFormat.FP8) / QWEN3_8B.read_bytes(WeightFormat.BF16)
    assert 0.5 < read < 0.6
    assert eight.decode.fixed_s == pytest.approx(plain.decode.fixed_s * read)
    assert eight.prefill.token_s == pytest.approx(plain.prefill.token_s / 2)
    assert eight.prefill.square_s == plain.prefill.square_s
    assert eight.decode.context_s == plain.decode.context_s
    assert eight.num_blocks > plain.num_blocks


def test_a_gpu_without_fp8_multiplies_no_faster_for_it():
    plain, fp8, int8 = (
        worker(platform=A100, options=ModelOptions(weights)).hardware.prefill.token_s
        for weights in (WeightFormat.BF16, WeightFormat.FP8, WeightFormat.INT8)
    )
    assert fp8 == plain
    assert int8 == pytest.approx(plain / 2)


def test_kv_of_8_bits_is_read_in_half_the_time_and_nearly_twice_as_much_fits():
    plain = worker()
    eight = worker(options=ModelOptions(kv_format=KVFormat.INT8))
    assert eight.hardware.decode.context_s / plain.hardware.decode.context_s == pytest.approx(
        132 / 256
    )
    assert eight.kv_tokens / plain.kv_tokens == pytest.approx(256 / 132, rel=1e-3)


def test_speculation_spreads_a_step_over_the_tokens_it_brings():
    plain = worker().hardware.decode
    fast = worker(options=ModelOptions(speculation=Speculation(2.0, 4, 0.05))).hardware.decode
    assert fast.fixed_s == pytest.approx(plain.fixed_s * 1.2 / 3)
    assert fast.row_s == pytest.approx(plain.row_s * 5 / 3)
    assert fast.context_s == pytest.approx(plain.context_s / 3)


# ---------------------------------------------------------------- loads


def test_prefill_mean_follows_its_formula():
    cost = worker().hardware.prefill
    load = ExpectedLoad(1.0, 2000, 300, 0.25, spread=0.0)
    expected = cost.fixed_s + cost.token_s * 1500 + cost.square_s * (2000**2 - 500**2)
    assert prefill_mean_s(load, worker()) == pytest.approx(expected)
    spread = ExpectedLoad(1.0, 2000, 300, 0.25, spread=0.5)
    more = cost.square_s * 2000**2 * (1 - 0.25**2) * (math.exp(0.25) - 1)
    assert prefill_mean_s(spread, worker()) == pytest.approx(expected + more)


def test_prefill_mean_matches_the_conversation_trace():
    profile = PROFILES["h200-qwen3-32b-tp2"]
    platform = Platform(profile.name, None, profile, 3.0)
    # of Mooncake's trace: median 6,909, no prefix cache
    load = ExpectedLoad(3.40, 12_035, 343, spread=1.05)
    busy = load.rate_per_s * prefill_mean_s(load, worker("qwen3-32b", platform, ranks=2))
    assert busy == pytest.approx(3.15, rel=0.05)


def test_wait_of_one_worker_matches_m_m_1():
    # M/M/1: the wait exceeds t with probability busy·e^(-(1 - busy)·t / service).
    assert wait_p90_s(1.0, 0.5, 1, variance=1.0) == pytest.approx(2 * math.log(5))
    assert wait_p90_s(1.0, 0.05, 1, variance=1.0) == 0.0
    assert wait_p90_s(1.0, 0.9, 8, variance=1.0) < wait_p90_s(1.0, 0.9, 1, variance=1.0)


def test_decode_formula_is_a_fixed_point_of_rows_and_step_time():
    slo = SloBounds(2.0, 0.03)
    found = disaggregated(ExpectedLoad(40.0, 2000, 300, spread=0.5), worker(), slo, max_workers=99)
    decode = worker().hardware.decode
    context = ExpectedLoad(40.0, 2000, 300).context_tokens
    assert found.running == pytest.approx(40 * 299 / found.pools.decode * found.tpot_s)
    assert found.tpot_s == pytest.approx(
        decode.fixed_s + found.running * (decode.row_s + decode.context_s * context)
    )


def test_more_load_and_tighter_bounds_never_need_fewer_workers():
    sizes = [
        disaggregated(
            ExpectedLoad(rate, 2000, 300), worker(), SloBounds(2.0, tpot_s), max_workers=999
        ).pools
        for tpot_s in (0.05, 0.02, 0.01)
        for rate in (5.0, 50.0, 200.0)
    ]
    for i, size in enumerate(sizes):
        if i % 3:
            assert size.prefill >= sizes[i - 1].prefill
            assert size.decode >= sizes[i - 1].decode
        if i >= 3:
            assert size.decode >= sizes[i - 3].decode


def test_one_pool_pays_for_prompts_in_its_steps():
    slo = SloBounds(2.0, 0.02)
    both = colocated(ExpectedLoad(60.0, 4000, 300), worker(), slo, max_workers=99)
    apart = disaggregated(ExpectedLoad(60.0, 4000, 300), worker(), slo, max_workers=99)
    assert both.pools.mixed >= apart.pools.prefill
    assert both.tpot_s <= 0.9 * 0.02


def test_memory_bounds_the_pool_under_loose_slos():
    small = worker("llama-3.1-70b", ranks=2)
    slo = SloBounds(60.0, 10.0)
    found = disaggregated(ExpectedLoad(2.0, 8000, 2000), small, slo, max_workers=99)
    assert found.kv_used <= 1
    fewer = found.pools.decode - 1
    assert fewer == 0 or found.kv_used * found.pools.decode / fewer > 0.8


def test_floor_is_the_latency_of_one_request_alone():
    floor = floor_of(ExpectedLoad(10.0, 2000, 300, spread=0.0), worker())
    hardware = worker().hardware
    assert floor.ttft_s == hardware.prefill.seconds(2000)
    assert floor.tpot_s == pytest.approx(hardware.decode.seconds(1, 2150))
    assert floor.meets(SloBounds(floor.ttft_s, floor.tpot_s))
    assert not floor.meets(SloBounds(floor.ttft_s * 0.99, floor.tpot_s))


# ---------------------------------------------------------------- generated requests


@pytest.mark.parametrize("hit", [0.0, 0.37, 0.8])
def test_synthetic_load_has_the_requested_means(hit):
    load = ExpectedLoad(5.0, 2000, 300, hit)
    trace = workload(load, num_requests=800, block_tokens=128, rng=Random(1))
    inputs = [r.input_len for r in trace.requests]
    outputs = [r.output_len for r in trace.requests]
    assert sum(inputs) / 800 == pytest.approx(2000, rel=0.01)
    assert sum(outputs) / 800 == pytest.approx(300, rel=0.01)
    assert max(inputs) <= 4 * 2000
    assert trace.duration_s == pytest.approx(800 / 5, rel=0.15)
    # The first request of each conversation has no cached prefix: an eighth of the requests here.
    assert infinite_cache_hits(trace) == pytest.approx(hit * 7 / 8, abs=0.02)
