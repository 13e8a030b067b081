"""Serves tiny checkpoints as a worker does, and compares the answers with transformers'."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engine.config import WeightFormat
from engine.messages import Sampling
from engine.model.runner import TorchRunner
from engine.worker.batch import BatchPlan, Row

BLOCK_SIZE = 16
GREEDY = Sampling(temperature=0.0)
WEIGHTS = "model.safetensors"


def prompt(num_tokens):
    return [(7 * i * i + 3) % 256 for i in range(num_tokens)]


def generate(path, token_ids, num_new, *, dtype=torch.float32):
    """Returns transformers' greedy answer."""
    config = AutoConfig.from_pretrained(path)
    sees = config.get_text_config(decoder=True) is not config
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=dtype).float().eval()
    output = model.generate(
        input_ids=torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(token_ids) :].tolist()


class Served:
    """A model, computed with a worker's code."""

    def __init__(self, path, *, weights=WeightFormat.FP32, num_blocks=8, max_len=None):
        size = {"block_size": BLOCK_SIZE, "num_blocks": num_blocks}
        self.runner = TorchRunner(path, **size, weights=weights, max_len=max_len)
        self.runner.open()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.runner.close()

    def answer(self, token_ids, num_new, *, chunk=10**9):
        """Returns greedy tokens; the prompt is computed in chunks."""
        table = list(range(-(-(len(token_ids) + num_new) // BLOCK_SIZE)))
        start, found = 0, []
        pending = list(token_ids)
        while True:
            part, pending = pending[:chunk], pending[chunk:]
            row = Row("a", part, start, table, None if pending else GREEDY)
            (result,) = self.runner.run(BatchPlan([row])).tokens
            start += len(part)
            if not pending:
                found.append(int(result))
                if len(found) == num_new:
                    return found
                pending = [found[-1]]


def check_equals_generate(path, *, lengths=(5, 60), num_new=8, **served):
    """Asserts that fp32 equals transformers, and that chunked prefill changes no token of int8."""
    with Served(path, **served) as model:
        for length in lengths:
            expected = generate(path, prompt(length), num_new)
            assert model.answer(prompt(length), num_new) == expected
        is_fused = model.runner.is_fused
    with Served(path, weights=WeightFormat.INT8, **served) as model:
        whole = model.answer(prompt(lengths[0]), num_new)
        assert model.answer(prompt(lengths[0]), num_new, chunk=3) == whole
    return is_fused


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def store_as(path, dtype):
    weights = {k: w.to(dtype) for k, w in load_file(path / WEIGHTS).items()}
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    edit_config(path, dtype=str(dtype).removeprefix("torch."))
