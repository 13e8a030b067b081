"""Trains the bundled model: tokenizer, target and draft, from CPython's standard library.

    python -m tools.bundled_model.train --minutes 240 --out engine/model/bundled
    python -m tools.bundled_model.train --draft-only --minutes 60 --lessons /tmp/lessons.pt

1. A byte-level BPE tokenizer of 4,096 tokens.
2. The target, a Llama shape of 5.8 M parameters, by next-token loss.
3. The draft, a Llama shape of 2.0 M parameters with the same tokenizer, distilled from the target
   on text that the target writes (`on_policy`, `distil`). `--draft-only` begins here, with the
   tokenizer and the target below --out.
4. Held-out perplexity and draft agreement (`evaluate`), measured on files that were never trained
   on and on answers to prompts from them, go into MODEL_CARD.md with the weights (bf16
   safetensors).

The run ends after `--minutes` on any machine.
"""

import argparse
import json
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from bench.quality import corpus
from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import MonotonicClock
from tools.bundled_model import on_policy
from tools.bundled_model.distil import Done, begin_as, distil
from tools.bundled_model.evaluate import TEMPERATURES, evaluate
from tools.bundled_model.muon import Optimisers
from tools.bundled_model.on_policy import Lessons, Prompts, Written

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
BATCH_TOKENS = 4096
SHORT_WINDOW = 512
LONG_WINDOWS = (2048, 4096)
DIALOGUE_SHARE = 0.2
LIBRARY_REPEATS = 2  # times that the library is read for each time that its tests are read
LONG_FROM = 0.85  # share of the target's training time after which windows are long
# share of the run's time for the draft; WRITING_SHARE is the part in which the target writes
DRAFT_SHARE = 0.4
WRITING_SHARE = 0.2
CHECKPOINT_EVERY_S = 600.0
MUON_LR, ADAM_LR = 0.02, 3e-3
JUDGED_PROMPTS = 64

PRE_TOKEN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def target_config() -> LlamaConfig:
    """Returns the target's shape, 5.8 M parameters: 6 layers, 256 wide, 4 heads of 64, 2 KV
    heads.
    """
    return _llama(layers=6, hidden=256, heads=4, kv_heads=2, ffn=768)


def draft_config() -> LlamaConfig:
    """Returns the draft's shape, 2.0 M parameters: two of the target's layers, with half of their
    MLPs.
    """
    return _llama(layers=2, hidden=256, heads=4, kv_heads=2, ffn=384)


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
    """Trains byte-level BPE. The special tokens get ids 0 to 4, in the order of `corpus`."""
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
    """Token streams int64 [num_tokens], for training and for evaluation."""

    code: torch.Tensor
    dialogues: torch.Tensor
    held_out: torch.Tensor
    held_out_dialogues: torch.Tensor


def encode(tokenizer: Tokenizer, docs: list[corpus.Document], rng: random.Random) -> Corpus:
    """Shuffles the documents and joins their tokens to one stream."""
    docs = list(docs)
    rng.shuffle(docs)
    encoded = tokenizer.encode_batch([d.text for d in docs], add_special_tokens=False)
    parts: dict[tuple[bool, bool], list[np.ndarray]] = {
        (held_out, is_dialogue): [] for held_out in (False, True) for is_dialogue in (False, True)
    }
    for doc, encoding in zip(docs, encoded, strict=True):
        ids = np.asarray(encoding.ids, dtype=np.int64)
        once = doc.held_out or doc.is_dialogue or doc.is_test_code
        parts[doc.held_out, doc.is_dialogue].extend([ids] * (1 if once else LIBRARY_REPEATS))
    rng.shuffle(parts[False, False])
    return Corpus(*(torch.from_numpy(np.concatenate(part)) for part in parts.values()))


def sample_batch(data: Corpus, window: int, rng: random.Random) -> torch.Tensor:
    """Returns random windows, int64 [BATCH_TOKENS / window, window + 1]."""
    rows = []
    for _ in range(BATCH_TOKENS // window):
        stream = data.dialogues if rng.random() < DIALOGUE_SHARE else data.code
        start = rng.randrange(len(stream) - window - 1)
        rows.append(stream[start : start + window + 1])
    return torch.stack(rows)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Saves the config and the weights, in bf16, of a Hugging Face model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(folder)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
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


def link_tokenizer(out: Path) -> None:
    """Links the target's tokenizer files into the draft's folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        link = out / "draft" / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"../target/{name}")


TARGET_CARD = """\
# Baton's bundled model

The tokenizer has {vocab:,} byte-pair tokens. The target is a Llama shape of {target_params:,} parameters. A
draft with the same tokenizer is distilled from it. Weights are bf16 safetensors. With this model,
Baton's quick start, tests and benchmarks run without a network. It completes Python plausibly. It
answers "Write a Python function `name`: what it does" with text that looks like Python. It is far too
small to be right: it knows nothing of the world. Do not run what it writes.

It was trained by `python -m tools.bundled_model.train` from the standard library of CPython {python}:
source, docstrings and tests (PSF License Version 2, see NOTICE). One file in {held_out_one_in} was held out.

| target | |
|---|---|
| training text | {train_tokens:,} tokens, of which {dialogue_tokens:,} in dialogues made from functions and docstrings |
| tokens trained on | {seen_tokens:,} in {steps:,} steps, {minutes:.0f} minutes on {cores} CPU cores |
| context | {positions:,} tokens (windows of {short} tokens, then of {long} in the last {long_share:.0%}) |
"""

DRAFT_HEADING = "## The draft"
DRAFT_CARD = """\
## The draft

The draft is a Llama shape of {draft_params:,} parameters, {layers} layers {hidden} wide. It began as the target's
embedding, first layer and last layer, with half of their MLPs. Then it was trained to give the
target's distribution on text that the target writes.

Agreement is the share of positions where draft and target choose the same token after the same text.
If they sample, the noise is the same. It is the share of first drafts that verification keeps.
Answers are the target's, to {num_prompts} prompts from held-out files (code and questions). They count up to
their end, or to {window} tokens with the prompt. All is computed in fp32.

| draft | |
|---|---|
| text that it learned from, most of it written by the target | {lesson_tokens:,} tokens |
| tokens trained on | {draft_seen_tokens:,} in {draft_steps:,} steps, {draft_minutes:.0f} minutes on {draft_cores} |
| held-out text | {held_out_tokens:,.0f} tokens |
| perplexity there, target | {perplexity:.2f} |
| perplexity there, draft | {draft_perplexity:.2f} |

| draft agrees with target | greedy | temperature 0.7 | temperature 1 |
|---|---|---|---|
| on the target's answers | {generated_agreement_0_0:.1%} | {generated_agreement_0_7:.1%} | {generated_agreement_1_0:.1%} |
| on held-out text | {agreement_0_0:.1%} | {agreement_0_7:.1%} | {agreement_1_0:.1%} |
"""


def train_target(data: Corpus, out: Path, *, minutes: float, rng: random.Random) -> None:
    """Trains for the given time; writes target/ and the target's part of the card below `out`."""
    clock = MonotonicClock()
    target = LlamaForCausalLM(target_config())
    optimisers = Optimisers(target, muon_lr=MUON_LR, adam_lr=ADAM_LR)
    begin_s = saved_s = clock.now_s()
    step = 0

    def checkpoint() -> None:
        save(target, out / "target")
        card = TARGET_CARD.format(
            vocab=VOCAB_SIZE,
            target_params=target.num_parameters(),
            python=platform.python_version(),
            held_out_one_in=corpus.HELD_OUT_ONE_IN,
            train_tokens=len(data.code) + len(data.dialogues),
            dialogue_tokens=len(data.dialogues),
            seen_tokens=step * BATCH_TOKENS,
            steps=step,
            minutes=(clock.now_s() - begin_s) / 60,
            cores=torch.get_num_threads(),
            positions=MAX_POSITIONS,
            short=SHORT_WINDOW,
            long=" and ".join(map(str, LONG_WINDOWS)),
            long_share=1 - LONG_FROM,
        )
        (out / "MODEL_CARD.md").write_text(card)

    while (share := (clock.now_s() - begin_s) / (minutes * 60)) < 1:
        window = SHORT_WINDOW if share < LONG_FROM else LONG_WINDOWS[step % 2]
        batch = sample_batch(data, window, rng)
        logits = target(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].reshape(-1))
        loss.backward()
        optimisers.step(share)
        step += 1
        if step % 20 == 0:
            rate = step * BATCH_TOKENS / (clock.now_s() - begin_s)
            print(f"{step} {share:.3f} loss {loss.item():.3f} {rate:.0f} tokens/s", flush=True)
        if clock.now_s() - saved_s > CHECKPOINT_EVERY_S:
            checkpoint()
            saved_s = clock.now_s()
    checkpoint()


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The target model, and the texts on which the draft is trained and evaluated."""

    target: LlamaForCausalLM
    lessons: Sequence[Lessons]
    held_out: torch.Tensor
    answers: Sequence[Written]


def train_draft(inputs: DraftInputs, out: Path, *, minutes: float, rng: random.Random) -> None:
    """Trains for the given time; writes draft/ and the draft's part of the card below `out`."""
    clock = MonotonicClock()
    begin_s = clock.now_s()
    draft = LlamaForCausalLM(draft_config())
    begin_as(draft, inputs.target, inputs.lessons[0].windows[:8].long())

    def checkpoint(done: Done, max_windows: int = 8) -> None:
        minutes = (clock.now_s() - begin_s) / 60
        save(draft, out / "draft")
        link_tokenizer(out)
        figures = evaluate(inputs.target, draft, inputs.held_out, inputs.answers, max_windows)
        print(json.dumps({"steps": done.steps, "loss": done.loss, **figures}), flush=True)
        write_draft_card(out / "MODEL_CARD.md", inputs, draft, done, minutes, figures)

    done = distil(
        draft,
        inputs.lessons,
        seconds=minutes * 60,
        rng=rng,
        clock=clock,
        checkpoint=checkpoint,
    )
    checkpoint(done, max_windows=64)


def write_draft_card(
    path: Path,
    inputs: DraftInputs,
    draft: LlamaForCausalLM,
    done: Done,
    minutes: float,
    figures: dict[str, float],
) -> None:
    """Replaces the section on the draft in the model card."""
    cores = torch.get_num_threads()
    text = DRAFT_CARD.format(
        draft_params=draft.num_parameters(),
        layers=draft.config.num_hidden_layers,
        hidden=draft.config.hidden_size,
        num_prompts=len(inputs.answers[0].windows),
        window=on_policy.WINDOW,
        lesson_tokens=sum(lesson.num_tokens for lesson in inputs.lessons),
        draft_seen_tokens=done.tokens,
        draft_steps=done.steps,
        draft_minutes=minutes,
        draft_cores=f"{cores} CPU core{'s' if cores > 1 else ''}",
        **figures,
    )
    of_target = path.read_text().partition(DRAFT_HEADING)[0].rstrip()
    path.write_text(f"{of_target}\n\n{text}")


def lessons_of(
    target: Path, prompts: Prompts, cache: Path | None, *, seconds: float, rng: random.Random
) -> list[Lessons]:
    """Returns the lessons in the file `cache`. If it is missing, makes and writes the lessons."""
    if cache is not None and cache.exists():
        return [Lessons(*tensors) for tensors in torch.load(cache)]
    lessons = on_policy.gather(target, prompts, seconds=seconds, rng=rng, clock=MonotonicClock())
    if cache is not None:
        torch.save([(x.windows, x.top_ids, x.top_logprobs) for x in lessons], cache)
    return lessons


def prompts_of(code: torch.Tensor, dialogues: torch.Tensor, tokenizer: Tokenizer) -> Prompts:
    """Returns a source of prompts that are cut from these token streams."""
    ends, begins = map(tokenizer.token_to_id, (corpus.END_OF_TEXT, corpus.ANSWER_BEGINS))
    return Prompts(code, dialogues, end_of_text=ends, answer_begins=begins)


def judged_answers(target: Path, prompts: Prompts) -> list[Written]:
    """Returns the target's answers for the evaluation. The same target gives the same answers."""
    return [
        on_policy.answers(
            target, prompts, temperature=temperature, num=JUDGED_PROMPTS, rng=random.Random(0)
        )
        for temperature in TEMPERATURES
    ]


def main() -> None:
    """Trains for the given time. Writes target/, draft/ and MODEL_CARD.md below --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=BUNDLED_MODEL.parent)
    parser.add_argument("--draft-only", action="store_true")
    parser.add_argument("--lessons", type=Path, help="file that keeps what the draft learns from")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)

    folder = args.out / "target"
    docs = list(corpus.documents(corpus.standard_library()))
    if args.draft_only:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer([d.text for d in docs if not (d.held_out or d.is_dialogue)])
        save_tokenizer(tokenizer, folder)
    data = encode(tokenizer, docs, rng)
    print(f"{len(data.code):,} code, {len(data.dialogues):,} dialogue tokens", flush=True)
    draft_minutes = args.minutes * (1 if args.draft_only else DRAFT_SHARE)
    if not args.draft_only:
        minutes = args.minutes - draft_minutes
        train_target(data, args.out, minutes=minutes, rng=rng)

    prompts = prompts_of(data.code, data.dialogues, tokenizer)
    seconds = draft_minutes * WRITING_SHARE * 60
    inputs = DraftInputs(
        target=LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        lessons=lessons_of(folder, prompts, args.lessons, seconds=seconds, rng=rng),
        held_out=data.held_out,
        answers=judged_answers(
            folder, prompts_of(data.held_out, data.held_out_dialogues, tokenizer)
        ),
    )
    train_draft(inputs, args.out, minutes=draft_minutes * (1 - WRITING_SHARE), rng=rng)


if __name__ == "__main__":
    main()
