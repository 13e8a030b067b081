"""Trains the bundled model: tokenizer, target and draft, from CPython's standard library.

    python -m engine.model.bundled.train --minutes 120 --out engine/model/bundled

1. A byte-level BPE tokenizer of 4,096 tokens.
2. The target, a Llama shape of 5.8 M parameters, by next-token loss.
3. The draft, a Llama shape of 0.9 M parameters with the same tokenizer, distilled from the target:
   from the middle of the run on, each batch also lowers KL(target || draft).
4. Held-out perplexity and draft agreement, measured on files that were never trained on, are
   written into MODEL_CARD.md with the weights (bf16 safetensors).

The schedule is a function of elapsed time, not of steps, so the run ends when it was told to on any
machine. Hidden matrices are trained by Muon (Jordan et al., 2024), the rest by AdamW.
"""

import argparse
import json
import math
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.bundled import corpus

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
BATCH_TOKENS = 4096
SHORT_WINDOW = 512
LONG_WINDOWS = (2048, 4096)
DIALOGUE_SHARE = 0.2
LIBRARY_REPEATS = 2  # the library is read twice as often as its tests
DRAFT_FROM = 0.5  # shares of the run's time
DECAY_FROM = 0.65
LONG_FROM = 0.85
MUON_LR, ADAM_LR, DRAFT_LR = 0.02, 3e-3, 3e-3

PRE_TOKEN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def target_config() -> LlamaConfig:
    """5.8 M parameters: 6 layers, 256 wide, 4 heads of 64, 2 KV heads."""
    return _llama(layers=6, hidden=256, heads=4, kv_heads=2, ffn=768)


def draft_config() -> LlamaConfig:
    """0.9 M parameters: 2 layers, 128 wide, 2 heads of 64, 1 KV head."""
    return _llama(layers=2, hidden=128, heads=2, kv_heads=1, ffn=384)


def _llama(*, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[0, 1],
        pad_token_id=0,
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; the special tokens take ids 0 to 4 in the order of `corpus`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams, int64 [num_tokens]: training code, training dialogues, held-out files."""

    code: torch.Tensor
    dialogues: torch.Tensor
    held_out: torch.Tensor


def encode(tokenizer: Tokenizer, docs: list[corpus.Document], rng: random.Random) -> Corpus:
    """Shuffles the documents and joins their tokens."""
    docs = list(docs)
    rng.shuffle(docs)
    encoded = tokenizer.encode_batch([d.text for d in docs], add_special_tokens=False)
    code: list[np.ndarray] = []
    dialogues: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    for doc, encoding in zip(docs, encoded, strict=True):
        ids = np.asarray(encoding.ids, dtype=np.int64)
        if doc.held_out:
            if not doc.is_dialogue:
                held_out.append(ids)
        elif doc.is_dialogue:
            dialogues.append(ids)
        else:
            code.extend([ids] * (1 if doc.is_test_code else LIBRARY_REPEATS))
    rng.shuffle(code)
    return Corpus(*(torch.from_numpy(np.concatenate(part)) for part in (code, dialogues, held_out)))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan et al., 2024).

    torch.optim.Muon does the same in bfloat16, which CPUs without AVX-512 BF16 multiply fifteen
    times slower than float32; this one stays in float32.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = _orthogonalise(p.grad.lerp(m, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def _orthogonalise(g: torch.Tensor) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def optimisers(
    model: LlamaForCausalLM, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    result: list[torch.optim.Optimizer] = [Muon(hidden, lr=muon_lr), adam]
    for optimiser in result:
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return result


def schedule(share: float) -> float:
    """Learning rate as a fraction of its peak after `share` of the run: warm-up, flat, linear."""
    if share < 0.01:
        return max(share / 0.01, 0.01)
    if share < DECAY_FROM:
        return 1.0
    return max((1 - share) / (1 - DECAY_FROM), 0.0)


def sample_batch(data: Corpus, window: int, rng: random.Random) -> torch.Tensor:
    """Random windows, int64 [BATCH_TOKENS / window, window + 1]."""
    rows = []
    for _ in range(BATCH_TOKENS // window):
        stream = data.dialogues if rng.random() < DIALOGUE_SHARE else data.code
        start = rng.randrange(len(stream) - window - 1)
        rows.append(stream[start : start + window + 1])
    return torch.stack(rows)


def distillation_loss(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || draft); both [tokens, vocab], no gradient into the target."""
    target_log = target_logits.detach().log_softmax(-1)
    return F.kl_div(
        draft_logits.log_softmax(-1), target_log, log_target=True, reduction="batchmean"
    )


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: torch.Tensor, max_windows: int
) -> dict[str, float]:
    """Held-out perplexity of both, and how often the draft's token is the target's.

    `agreement_greedy` compares argmax; `agreement_sampled` adds the same Gumbel noise to both, as
    Baton's decoder does at temperature 1.
    """
    window = 1024
    num = min(max_windows, (len(held_out) - 1) // window)
    losses, draft_losses, greedy, sampled = [], [], [], []
    generator = torch.Generator().manual_seed(0)
    for i in range(num):
        chunk = held_out[i * window : (i + 1) * window + 1]
        x, y = chunk[None, :-1], chunk[1:]
        logits, draft_logits = target(x).logits[0].float(), draft(x).logits[0].float()
        losses.append(F.cross_entropy(logits, y).item())
        draft_losses.append(F.cross_entropy(draft_logits, y).item())
        greedy.append((logits.argmax(-1) == draft_logits.argmax(-1)).float().mean().item())
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        same = (logits + noise).argmax(-1) == (draft_logits + noise).argmax(-1)
        sampled.append(same.float().mean().item())
    return {
        "held_out_tokens": float(num * window),
        "perplexity": math.exp(np.mean(losses)),
        "draft_perplexity": math.exp(np.mean(draft_losses)),
        "agreement_greedy": float(np.mean(greedy)),
        "agreement_sampled": float(np.mean(sampled)),
    }


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face model directory with bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END_OF_TEXT,
        "eos_token": corpus.END_OF_TURN,
        "pad_token": corpus.END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        "chat_template": corpus.CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


CARD = """\
# Baton's bundled model

A byte-pair tokenizer of {vocab:,} tokens, a Llama-shaped target of {target_params:,} parameters and a
draft of {draft_params:,} with the same tokenizer, distilled from the target. Weights are bf16
safetensors, {size_mb:.1f} MB in all. It exists so that Baton's quick start, tests and benchmarks run
with no network. It completes Python plausibly and answers "Write a Python function `name`: what it
does" with something that looks like Python. It is far too small to be right: it knows nothing of
the world, and nothing that it writes should be run.

Trained by `python -m engine.model.bundled.train` from the standard library of CPython {python}
(source, docstrings and tests; PSF License Version 2, see NOTICE); one file in {held_out_one_in} was held out.

| figure | value |
|---|---|
| training text | {train_tokens:,} tokens, of which {dialogue_tokens:,} in dialogues made from functions and docstrings |
| tokens trained on | {seen_tokens:,} in {steps:,} steps, {minutes:.0f} minutes on {cores} CPU cores |
| context | {positions:,} tokens (windows of {short} tokens, then of {long} in the last {long_share:.0%}) |
| held-out perplexity, target | {perplexity:.2f} on {held_out_tokens:,.0f} tokens |
| held-out perplexity, draft | {draft_perplexity:.2f} |
| draft agrees with target, greedy | {agreement_greedy:.1%} of positions |
| draft agrees with target, sampled at temperature 1 with common noise | {agreement_sampled:.1%} of positions |
"""


def backward(
    target: LlamaForCausalLM, draft: LlamaForCausalLM | None, batch: torch.Tensor
) -> torch.Tensor:
    """Gradients of one batch, int64 [rows, window + 1]; returns the target's loss."""
    x, y = batch[:, :-1], batch[:, 1:].reshape(-1)
    logits = target(x, use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    if draft is not None:
        draft_logits = draft(x, use_cache=False).logits.flatten(0, 1)
        distillation_loss(logits, draft_logits).backward()
    return loss


def facts(data: Corpus, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, object]:
    """What the model card says that does not depend on how training goes."""
    return {
        "vocab": VOCAB_SIZE,
        "target_params": sum(p.numel() for p in target.parameters()),
        "draft_params": sum(p.numel() for p in draft.parameters()),
        "python": platform.python_version(),
        "held_out_one_in": corpus.HELD_OUT_ONE_IN,
        "train_tokens": len(data.code) + len(data.dialogues),
        "dialogue_tokens": len(data.dialogues),
        "cores": torch.get_num_threads(),
        "positions": MAX_POSITIONS,
        "short": SHORT_WINDOW,
        "long": " and ".join(str(w) for w in LONG_WINDOWS),
        "long_share": 1 - LONG_FROM,
    }


def main() -> None:
    """Trains for the given time and writes target/, draft/ and MODEL_CARD.md below --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)

    docs = list(corpus.documents(corpus.standard_library()))
    tokenizer = train_tokenizer([d.text for d in docs if not (d.held_out or d.is_dialogue)])
    data = encode(tokenizer, docs, rng)
    print(f"{len(data.code):,} code, {len(data.dialogues):,} dialogue tokens", flush=True)
    target, draft = LlamaForCausalLM(target_config()), LlamaForCausalLM(draft_config())
    target_opts = optimisers(target, MUON_LR, ADAM_LR)
    draft_opts = optimisers(draft, MUON_LR, DRAFT_LR)
    card = facts(data, target, draft)

    def checkpoint(step: int, max_windows: int) -> None:
        target.eval(), draft.eval()
        figures = evaluate(target, draft, data.held_out, max_windows)
        target.train(), draft.train()
        save(target, tokenizer, args.out / "target")
        save(draft, tokenizer, args.out / "draft")
        card.update(figures)
        card["steps"], card["seen_tokens"] = step, step * BATCH_TOKENS
        card["minutes"] = (time.monotonic() - started_s) / 60
        card["size_mb"] = sum(f.stat().st_size for f in args.out.rglob("*.safetensors")) / 1e6
        (args.out / "MODEL_CARD.md").write_text(CARD.format(**card))
        print(json.dumps({"step": step, **figures}), flush=True)

    started_s = last_save_s = time.monotonic()
    step = 0
    while (share := (time.monotonic() - started_s) / (args.minutes * 60)) < 1:
        drafting = share >= DRAFT_FROM
        window = SHORT_WINDOW if share < LONG_FROM else LONG_WINDOWS[step % 2]
        batch = sample_batch(data, window, rng)
        loss = backward(target, draft if drafting else None, batch)
        for optimiser in [*target_opts, *(draft_opts if drafting else [])]:
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * schedule(share)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            elapsed_s = time.monotonic() - started_s
            rate = step * BATCH_TOKENS / elapsed_s
            print(f"{step} {share:.3f} loss {loss.item():.3f} {rate:.0f} tokens/s", flush=True)
        if time.monotonic() - last_save_s > 600:
            checkpoint(step, max_windows=32)
            last_save_s = time.monotonic()
    checkpoint(step, max_windows=256)


if __name__ == "__main__":
    main()
