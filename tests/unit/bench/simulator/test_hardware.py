import msgspec
import pytest

from bench.simulator.hardware import (
    PROFILES,
    Pricing,
    StepPrice,
    hardware_named,
    write_hardware,
)
from engine.errors import ConfigError


@pytest.mark.parametrize(("name", "kilobytes"), [("0.6b", 112), ("8b", 144), ("32b-tp2", 256)])
def test_kv_bytes_of_a_token_follow_from_the_model(name, kilobytes):
    assert PROFILES[f"h200-qwen3-{name}"].kv_token_bytes == kilobytes * 1024


def test_prices_are_near_their_source_tables():
    pricing = Pricing(PROFILES["h200-qwen3-8b"])
    for length, ms in ((1024, 22.1), (4096, 91.2), (16_384, 455), (32_768, 1177)):
        price = StepPrice(num_new=length, squares=length**2)
        assert pricing.step_s(price) * 1000 == pytest.approx(ms, rel=0.06)
    assert pricing.decode_s(64, 64 * 2048) * 1000 == pytest.approx(10.19, rel=0.03)


def test_linear_profile_prices_only_new_tokens():
    pricing = Pricing(PROFILES["h200-qwen3-32b-tp2-linear"])
    near, far = StepPrice(8192, 8192**2), StepPrice(8192, 65_536**2 - 57_344**2)
    assert pricing.step_s(near) == pricing.step_s(far) == 0.473798
    assert pricing.step_s(StepPrice(768)) == pytest.approx((29.386 + 53.678) / 2000)
    assert pricing.step_s(StepPrice(1)) == pytest.approx(17.6316e-3)


def test_decoding_beside_a_prompt_pays_for_the_weights_once():
    hardware = PROFILES["h200-qwen3-8b"]
    pricing = Pricing(hardware)
    prompt, rows = StepPrice(1024, 1024**2), StepPrice(0, 0, 8, 16_000)
    both = StepPrice(1024, 1024**2, 8, 16_000)
    saved = min(hardware.prefill.fixed_s, hardware.decode.fixed_s)
    assert pricing.step_s(both) == pytest.approx(
        pricing.step_s(prompt) + pricing.step_s(rows) - saved
    )


def test_written_profile_is_read_back(tmp_path):
    profile = PROFILES["h200-qwen3-32b-tp2-linear"]
    write_hardware(profile, tmp_path / "mine.json")
    assert hardware_named(str(tmp_path / "mine.json")) == profile


def test_invalid_profile_is_an_error_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="h200-qwen3-8b"):
        hardware_named("h300")
    with pytest.raises(ConfigError, match=r"No such file"):
        hardware_named(str(tmp_path / "none.json"))
    path = tmp_path / "bad.json"
    fields = msgspec.to_builtins(PROFILES["h200-qwen3-8b"])
    for change in ({"num_blocks": 0}, {"blocks": 3}, {"chunk_table": [[1, 2.0]]}):
        path.write_bytes(msgspec.json.encode(fields | change))
        with pytest.raises(ConfigError, match=str(path)):
            hardware_named(str(path))
