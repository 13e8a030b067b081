"""Decoders of embeddings compute the hidden states of transformers, alone and in any batch."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from engine.config import WeightFormat
from engine.errors import CheckpointError
from engine.messages import Sampling
from engine.model.loading.checkpoint import load
from engine.model.runner import TorchRunner
from engine.worker.batch import BatchPlan, Row
from tests.kits.checkpoints import make_embedding, tiny_checkpoint
from tests.kits.models.served import BLOCK_SIZE, WEIGHTS, edit_config, prompt

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0)
LENGTHS = (5, 40, 1)


def embedding_checkpoint(tmp_path_factory, kind):
    """Saves a checkpoint with the weights of the base model, without a head."""
    path = tmp_path_factory.mktemp("embedding") / kind
    shutil.copytree(tiny_checkpoint(tmp_path_factory, kind), path)
    weights = load_file(path / WEIGHTS)
    del weights["lm_head.weight"]
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    edit_config(path, architectures=[f"{kind.capitalize()}Model"])
    make_embedding(path)
    return path


def expected(path, token_ids):
    """Returns the last token's state [hidden], computed by transformers."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids])).last_hidden_state[0, -1].numpy()


def embed(path, *, weights=WeightFormat.FP32, chunk=16):
    """Returns the embeddings of all prompts, computed in chunks and in common batches."""
    runner = TorchRunner(path, block_size=BLOCK_SIZE, num_blocks=12, weights=weights)
    runner.open()
    assert runner.embeds
    found = {}
    try:
        for start in range(0, max(LENGTHS), chunk):
            rows = []
            for index, length in enumerate(LENGTHS):
                part = prompt(length)[start : start + chunk]
                is_last = start < length <= start + chunk
                if part:
                    table = [index * 4 + block for block in range(4)]
                    sampling = GREEDY if is_last else None
                    rows.append(Row(str(index), part, start, table, sampling))
            results = runner.run(BatchPlan(rows)).rows
            for row, result in zip(rows, results, strict=True):
                if row.sampling is not None:
                    found[int(row.seq_id)] = np.frombuffer(result.embedding, np.float32)
                else:
                    assert not result.embedding
    finally:
        runner.close()
    return [found[index] for index in range(len(LENGTHS))]


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_embeddings_equal_those_computed_by_transformers(kind, tmp_path_factory):
    path = embedding_checkpoint(tmp_path_factory, kind)
    for length, state in zip(LENGTHS, embed(path), strict=True):
        np.testing.assert_allclose(state, expected(path, prompt(length)), rtol=0, atol=2e-5)


def test_rounded_weights_point_the_same_way(tmp_path_factory):
    path = embedding_checkpoint(tmp_path_factory, "qwen3")
    for exact, rounded in zip(
        embed(path), embed(path, weights=WeightFormat.INT8, chunk=7), strict=True
    ):
        cosine = exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded)
        assert cosine > 0.98


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_causal": False}, "bidirectional attention cannot be served"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "which is not a decoder"),
    ],
)
def test_other_models_are_refused(changes, reason, tmp_path_factory):
    path = embedding_checkpoint(tmp_path_factory, "qwen3")
    edit_config(path, **changes)
    with pytest.raises(CheckpointError, match=reason):
        load(path, kv_format="fp32", block_size=BLOCK_SIZE)


def test_a_cap_on_logits_is_refused(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedding") / "gemma2"
    shutil.copytree(tiny_checkpoint(tmp_path_factory, "gemma2"), path)
    make_embedding(path)
    with pytest.raises(CheckpointError, match="final_logit_softcapping"):
        load(path, kv_format="fp32", block_size=BLOCK_SIZE)
