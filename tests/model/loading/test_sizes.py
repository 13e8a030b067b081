"""The estimated sizes of a model, from which the work of a step is computed."""

from types import SimpleNamespace

import pytest

from engine.model.sizes import number_of, share_of_experts
from tests.kits.checkpoints import COMMON, KINDS, save_checkpoint
from tests.kits.models.served import Served

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (2.5, 2.5),
        ([1, 2, 2, 3], 2.0),
        ([], None),
        (None, None),
        ("2", None),
        (True, None),
        ([1, None], None),
        ({"a": 1}, None),
    ],
)
def test_a_number_of_a_config_may_be_one_of_each_layer_or_unknown(value, number):
    assert number_of(SimpleNamespace(n=value), "n") == number


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 1.0),
        ({"num_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"num_experts": 4, "moe_topk": [1, 3]}, 0.5),
        ({"num_experts": [4, 4], "moe_topk": [2, 2]}, 0.5),
        ({"moe_num_experts": 8, "moe_k": 2}, 0.25),
        ({"num_experts": 128, "top_k_experts": 8}, 0.0625),
        ({"ffn_config": SimpleNamespace(moe_num_experts=16, moe_top_k=4)}, 0.25),
        ({"num_experts": 8}, 1.0),
        ({"num_experts": 0, "num_experts_per_tok": 0}, 1.0),
        ({"num_experts": None, "num_experts_per_tok": "all"}, 1.0),
    ],
)
def test_a_token_meets_some_of_the_experts(config, share):
    assert share_of_experts(SimpleNamespace(**config)) == share


def test_a_model_that_also_sees_counts_as_its_text_part(tmp_path):
    text = COMMON | KINDS["qwen3_moe"]
    save_checkpoint(tmp_path / "text", text)
    seeing = {
        "model_type": "qwen3_vl_moe",
        "text_config": text | {"model_type": "qwen3_vl_moe_text", "rope_parameters": ROPE},
        "vision_config": VISION,
    }
    save_checkpoint(tmp_path / "seeing", seeing)
    sizes = []
    for name in ("text", "seeing"):
        with Served(tmp_path / name) as model:
            sizes.append(model.runner.sizes)
    assert sizes[0].attention_size == 4 * 16 * 3
    assert sizes[1] == sizes[0]
