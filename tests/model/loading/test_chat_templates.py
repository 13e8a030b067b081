"""Prompts from named templates and continued messages equal the prompts of transformers."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from router.text.templates import TemplateOptions
from router.text.tokenizer import load_text_model
from tests.kits.router.gateway import byte_tokenizer

OPEN = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
TURN = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endfor %}"
TRIMMED = TURN.replace("m.content", "m.content | trim")
FINAL = ["so I", "def f(x):\n    ", " so ", "", " ", "\n\n", "a\tb\t"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = {"default": TURN, "tool_use": "with tools"}


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def both(folder, template, files=None):
    """Loads the folder's tokenizer with transformers and with Baton."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return PreTrainedTokenizerFast.from_pretrained(str(folder)), load_text_model(folder)


@pytest.mark.parametrize("template", [TURN, TRIMMED])
@pytest.mark.parametrize("final", FINAL)
def test_a_final_message_is_continued(folder, template, final):
    theirs, ours = both(folder, template)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(said, tokenize=False, continue_final_message=True)
    assert ours.templates.choose(with_tools=False).render(said, options=OPEN) == expected


@pytest.mark.parametrize(
    ("template", "files"),
    [
        (NAMED, {}),
        ([{"name": name, "template": text} for name, text in NAMED.items()], {}),
        (
            "config",
            {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "t"},
        ),
        ("config", {"additional_chat_templates/default.jinja": "d"}),
        (None, {"chat_template.jinja": "file", "additional_chat_templates/default.jinja": "d"}),
    ],
)
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_the_same_template_is_chosen(folder, template, files, tools):
    theirs, ours = both(folder, template, files)
    said = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(
        said, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert ours.templates.choose(with_tools=bool(tools)).render(said, tools) == expected
