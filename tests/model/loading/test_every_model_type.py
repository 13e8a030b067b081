"""Tiny random models of every text decoder in transformers: computed correctly, or refused.

A type without a tiny config here is skipped. `--junit-xml` lists the outcome of each type.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import WeightFormat
from engine.errors import CheckpointError
from tests.kits.checkpoints import COMMON, SLIDING_WINDOW, save_checkpoint
from tests.kits.models.served import Served, generate, prompt, store_as

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MAX_PARAMETERS = 3e7
LENGTHS = (7, 90)  # lengths of prompts: one inside all windows, one beyond all
NUM_NEW = 8
SMALL = {  # small values, used if a config has the property
    "head_dim": 8,
    "kv_lora_rank": 8,
    "moe_intermediate_size": 24,
    "moe_topk": 2,
    "n_group": 1,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 4,
    "sliding_window": SLIDING_WINDOW,
    "topk_group": 1,
    "v_head_dim": 16,
}
LATENT = {"num_key_value_heads": 4, "head_dim": None}  # attention with K and V of low rank
NEEDS_MORE = {
    "beam": {"is_decoder": True},
    "bert": {"is_decoder": True},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 3},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"layer_types": ["full_attention"] * 3},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "modernbert-decoder": {"pad_token_id": 0},
    "reformer": {"is_decoder": True},
}


def tiny_config(model_type):
    default = AutoConfig.for_model(model_type)
    properties = COMMON | {k: v for k, v in SMALL.items() if getattr(default, k, None) is not None}
    if getattr(default, "kv_lora_rank", None):
        properties |= LATENT
        del properties["head_dim"]
    return properties | NEEDS_MORE.get(model_type, {}) | {"model_type": model_type}


def saved(path, model_type):
    """Saves a tiny checkpoint of this model type, or skips the test."""
    try:
        properties = tiny_config(model_type)
        config = AutoConfig.for_model(**properties)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        size = sum(p.numel() for p in model.parameters())
        if size <= MAX_PARAMETERS:
            save_checkpoint(path, properties)
            return
    except Exception as error:  # configs and models may raise any error
        pytest.skip(f"no tiny config: {error!r:.150}")
    pytest.skip(f"no tiny config: {size} parameters")


@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_model_equals_generate_or_is_refused(model_type, tmp_path, record_property):
    saved(tmp_path, model_type)
    try:
        served = Served(tmp_path, num_blocks=8)
    except CheckpointError as reason:
        record_property("outcome", f"refused: {reason}")
        return
    how = "as one call" if served.runner.is_fused else "layer by layer"
    record_property("outcome", f"served {how}")
    with served:
        for length in LENGTHS:
            found = served.answer(prompt(length), NUM_NEW)
            assert found == generate(tmp_path, prompt(length), NUM_NEW)
    with Served(tmp_path, weights=WeightFormat.INT8) as rounded:
        assert len(rounded.answer(prompt(LENGTHS[0]), NUM_NEW)) == NUM_NEW
    store_as(tmp_path, torch.bfloat16)
    with Served(tmp_path) as half:
        assert half.answer(prompt(LENGTHS[0]), NUM_NEW) == generate(
            tmp_path, prompt(LENGTHS[0]), NUM_NEW, dtype=torch.bfloat16
        )
