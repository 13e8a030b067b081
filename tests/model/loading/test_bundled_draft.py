"""Training and evaluation of the bundled draft. The evaluation drafts in the same way as
decoding.
"""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.quality import corpus
from deploy.base.defaults import BUNDLED_MODEL
from tools.bundled_model import on_policy
from tools.bundled_model.distil import Done, begin_as, distil, distillation_loss
from tools.bundled_model.evaluate import TEMPERATURES, evaluate
from tools.bundled_model.on_policy import TOP, Lessons, Prompts

pytestmark = pytest.mark.torch

BUNDLED = BUNDLED_MODEL.parent
END, USER, ANSWER = (
    corpus.SPECIAL_TOKENS.index(token)
    for token in (corpus.END_OF_TEXT, "<|user|>", corpus.ANSWER_BEGINS)
)
VOCAB = 96
PROMPTS = 4


class Ticking:
    """A clock that advances one second at every call."""

    def __init__(self):
        self.now = 0.0

    def now_s(self):
        self.now += 1
        return self.now


def tiny(layers, *, ffn=48, vocab=VOCAB):
    torch.manual_seed(layers)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    )


def lessons_of(target, windows):
    with torch.no_grad():
        top = target(windows).logits.log_softmax(-1).topk(TOP)
    return Lessons(windows, top.indices.to(torch.int16), top.values.to(torch.float16))


@pytest.fixture
def windows():
    return torch.randint(0, VOCAB, (12, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def answers():
    """Returns short answers of the bundled target, at each temperature."""
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(5, 4096, (2000,), generator=generator)
    dialogue = [USER, 7, 8, 9, *range(300, 340), 1, ANSWER, 11, 12, 1, END]
    prompts = Prompts(code, torch.tensor(2 * dialogue), end_of_text=END, answer_begins=ANSWER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_policy, "WINDOW", 128)
        return [
            on_policy.answers(
                BUNDLED / "target", prompts, temperature=t, num=PROMPTS, rng=random.Random(0)
            )
            for t in TEMPERATURES
        ]


def bundled_model(name):
    return LlamaForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32).eval()


def agreements(draft, answers):
    held_out = torch.arange(5, 1100)
    figures = evaluate(bundled_model("target"), draft, held_out, answers, max_windows=1)
    return [figures[f"generated_agreement_{name}"] for name in ("0_0", "0_7", "1_0")]


def test_a_target_agrees_with_its_own_text(answers):
    """All tokens agree except ties that int8 weights resolve otherwise. Noise and positions are the
    decoder's own.
    """
    assert min(agreements(bundled_model("target"), answers)) > 0.9


def test_an_untrained_draft_hardly_ever_agrees(answers):
    assert max(agreements(tiny(1, vocab=4096).eval(), answers)) < 0.1


def test_windows_begin_with_their_prompts_and_no_two_share_a_seed(answers):
    for text in answers:
        assert text.windows.shape == (PROMPTS, 128)
        assert all(on_policy.MIN_PROMPT <= n <= 96 for n in text.prompt_lens)
    assert len({sampling.seed for sampling in answers[-1].samplings}) == PROMPTS
    assert [list(t.prompt_lens) for t in answers[1:]] == 2 * [list(answers[0].prompt_lens)]


def test_a_question_ends_where_its_answer_begins():
    one = [USER, *range(20, 40), ANSWER, 50, 51, END]
    two = [USER, *range(60, 90), ANSWER, 52, END]
    prompts = Prompts(
        torch.arange(5, 500), torch.tensor([END, *one, *two]), end_of_text=END, answer_begins=ANSWER
    )
    drawn = prompts.draw(50, 128, random.Random(0))
    questions = {tuple(prompt) for prompt in drawn if prompt[0] == USER}
    assert questions == {tuple(one[:-3]), tuple(two[:-2])}
    assert {tuple(prompt) for prompt in drawn} - questions


def test_the_loss_is_zero_if_the_draft_is_the_target(windows):
    target = tiny(2)
    lesson = lessons_of(target, windows)
    expected = lesson.top_ids.long().flatten(0, 1), lesson.top_logprobs.float().flatten(0, 1)
    with torch.no_grad():
        own, other = (model(windows).logits.flatten(0, 1) for model in (target, tiny(3)))
    assert abs(distillation_loss(own, *expected)) < 1e-3
    assert distillation_loss(other, *expected) > 0.1


def test_a_draft_of_the_targets_shape_begins_as_the_target(windows):
    target, draft = tiny(2), tiny(2)
    torch.nn.init.zeros_(draft.model.norm.weight)
    begin_as(draft, target, windows)
    with torch.no_grad():
        torch.testing.assert_close(draft(windows).logits, target(windows).logits)


def test_an_mlp_keeps_its_useful_half(windows):
    target, draft = tiny(2), tiny(2, ffn=24)
    silent = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:24]
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight[:, silent] = 0
        begin_as(draft, target, windows)
        torch.testing.assert_close(draft(windows).logits, target(windows).logits)


def test_training_brings_the_draft_nearer_to_the_target(windows):
    target, draft = tiny(4), tiny(2, ffn=24)
    lesson = lessons_of(target, windows)
    begin_as(draft, target, windows)
    expected = lesson.top_ids.long().flatten(0, 1), lesson.top_logprobs.float().flatten(0, 1)

    def loss():
        with torch.no_grad():
            return distillation_loss(draft(windows).logits.flatten(0, 1), *expected).item()

    before = loss()
    saved: list[Done] = []
    done = distil(
        draft,
        [lesson],
        seconds=100.0,
        rng=random.Random(0),
        clock=Ticking(),
        checkpoint=saved.append,
    )
    assert loss() < 0.7 * before
    assert done.tokens == done.steps * windows.numel()
    assert not saved
