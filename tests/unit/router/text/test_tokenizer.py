"""A checkpoint's text files: where each setting is read, and the errors for bad files."""

import json

import pytest
from tokenizers import processors

from engine.errors import CheckpointError, InvalidRequest
from router.text.tokenizer import PREFIX, SUFFIX, TextModel, load_text_model
from tests.kits.router.gateway import EOS, TOKENIZER, byte_tokenizer

USER = [{"role": "user", "content": "yo"}]


def checkpoint(path, *, config=None, files=None):
    """Writes a checkpoint's text files; `files` maps names to JSON values or texts."""
    tokenizer = byte_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    for name, content in (files or {}).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, encoding="utf-8")
    return path


def rendered(path, template, messages=USER, **config):
    model = load_text_model(checkpoint(path, config={"chat_template": template, **config}))
    return bytes(model.encode_chat(messages, 4096)).decode()


def test_vocabulary_and_round_trip(tmp_path):
    model = load_text_model(checkpoint(tmp_path))
    assert model.vocab_size == 260
    assert model.encode_text("é", 4096) == [0xC3, 0xA9]
    detokenizer = model.detokenizer([1])
    assert [detokenizer.push(token_id) for token_id in (0xC3, 0xA9, 256)] == ["", "é", ""]


def test_only_plain_text_gets_the_tokenizers_special_tokens(tmp_path):
    checkpoint(tmp_path, config={"chat_template": "{{ messages[0].content }}"})
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|eos|> $A", special_tokens=[("<|eos|>", 256)]
    )
    tokenizer.enable_truncation(max_length=3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = load_text_model(tmp_path)
    # The truncation that the file sets is not applied.
    assert model.encode_text("abcd", 4096) == [256, *b"abcd"]
    assert model.encode_chat(USER, 4096) == [*b"yo"]


def model_with(*names, **options):
    """Returns a model whose tokenizer puts `<|eos|>` before every text and knows these tokens
    too."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(names))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|eos|> $A", special_tokens=[("<|eos|>", EOS)]
    )
    return TextModel(tokenizer, **options)


@pytest.mark.parametrize(
    "form",
    [
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
        ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
        ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),
        ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),
    ],
    ids=lambda form: form[0],
)
def test_a_text_between_two_has_the_form_of_its_family(form):
    model = model_with(*(part for part in form if part not in (PREFIX, SUFFIX)))
    texts = {PREFIX: [*b"ab"], SUFFIX: [*b"yz"]}
    expected = [token_id for p in form for token_id in texts.get(p, [model.added_token_id(p)])]
    for special, lead in ((True, [EOS]), (False, [])):
        prefix = model.encode_text("ab", 100, add_special_tokens=special)
        assert prefix == [*lead, *b"ab"]
        assert model.encode_between(prefix, "yz", 100) == [*lead, *expected]


def test_without_tokens_for_it_no_text_is_filled_in():
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    outside = model_with(*names, vocab_size=261)  # two tokens are beyond the model's vocabulary
    for model in (model_with(), model_with(*names[:2]), outside):
        with pytest.raises(InvalidRequest, match="suffix is not supported"):
            model.encode_between([*b"ab"], "yz", 100)


def test_tokens_that_end_an_answer_are_collected_from_all_files(tmp_path):
    files = {
        "generation_config.json": {"eos_token_id": [258, 256]},
        "config.json": {"eos_token_id": 257},
    }
    checkpoint(tmp_path, config={"eos_token": {"content": "<|assistant|>"}}, files=files)
    assert load_text_model(tmp_path).eos_token_ids == (258, 256, 257, 259)


def test_a_checkpoint_may_name_no_end(tmp_path):
    checkpoint(tmp_path, config={"eos_token": None}, files={"config.json": {"eos_token_id": None}})
    assert load_text_model(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        "special_tokens_map.json",
    ],
)
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_file_is_named(tmp_path, name, content):
    checkpoint(tmp_path)
    if name == "special_tokens_map.json":  # this file is read even without the other file
        (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        load_text_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["</s>", [2, "x"], [None], {"id": 2}, 2.5, True])
def test_eos_token_ids_that_are_no_ids_are_named(tmp_path, name, value):
    checkpoint(tmp_path, files={name: {"eos_token_id": value}})
    with pytest.raises(CheckpointError, match=rf"{name}: eos_token_id: Expected `int"):
        load_text_model(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    (checkpoint(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_text_model(tmp_path)


def test_a_tokenizer_needs_no_configuration(tmp_path):
    specials = {"bos_token": {"content": "BOS"}, "eos_token": "<|assistant|>"}
    files = {"special_tokens_map.json": specials}
    checkpoint(tmp_path, files=files | {"chat_template.jinja": "{{ bos_token }}|"})
    (tmp_path / "tokenizer_config.json").unlink()
    model = load_text_model(tmp_path)
    assert bytes(model.encode_chat(USER, 4096)) == b"BOS|"
    assert model.eos_token_ids == (259,)
    (tmp_path / "special_tokens_map.json").unlink()
    assert load_text_model(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 2.5), ("top_p", 0), ("top_k", -2), ("min_p", 2), ("repetition_penalty", "1")],
)
def test_a_default_that_no_request_may_have_is_named_with_the_way_out(tmp_path, field, value):
    checkpoint(tmp_path, files={"generation_config.json": {field: value}})
    with pytest.raises(CheckpointError, match=rf"`\$\.{field}`; --generation-config none ignores"):
        load_text_model(tmp_path)
    assert load_text_model(tmp_path, has_defaults=False).defaults.temperature == 1.0


# ---------------------------------------------------------------- chat templates


NAMES = {"tool_use": "a", "default": "b", "rag": "{% for %}"}  # an unused template may be invalid
LIST = [{"name": name, "template": source} for name, source in NAMES.items()]
JINJA = "chat_template.jinja"
MORE = "additional_chat_templates"


@pytest.mark.parametrize(
    ("config", "files", "expected"),  # expected template with tools and without; None: refused
    [
        ({"chat_template": "x"}, {JINJA: "file"}, ("file", "file")),
        ({"chat_template": LIST}, {}, ("a", "b")),
        ({"chat_template": NAMES}, {}, ("a", "b")),
        ({"chat_template": {"default": "b"}}, {}, ("b", "b")),
        ({"chat_template": {"tool_use": "a"}}, {}, ("a", None)),
        ({"chat_template": {"rag": "c"}}, {}, (None, None)),
        ({"chat_template": LIST}, {JINJA: "file"}, ("file", "file")),
        ({}, {JINJA: "file", f"{MORE}/tool_use.jinja": "t"}, ("t", "file")),
        ({"chat_template": "x"}, {f"{MORE}/tool_use.jinja": "t"}, ("t", None)),
        ({}, {JINJA: "file", f"{MORE}/default.jinja": "d"}, ("d", "d")),
        ({}, {JINJA: "file", f"{MORE}/tool_use.txt": "t"}, ("file", "file")),
        ({}, {"chat_template.json": {"chat_template": "j"}}, ("j", "j")),
        ({"chat_template": "x"}, {"chat_template.json": {"chat_template": "j"}}, ("x", "x")),
        ({"chat_template": None}, {"processor_config.json": {"chat_template": NAMES}}, ("a", "b")),
        (
            {},
            {"processor_config.json": {}, "chat_template.json": {"chat_template": "j"}},
            ("j",) * 2,
        ),
    ],
)
def test_templates_have_the_names_that_transformers_gives_them(tmp_path, config, files, expected):
    (tmp_path / MORE).mkdir()
    model = load_text_model(checkpoint(tmp_path, config=config, files=files))
    for tools, text in zip(([{}], None), expected, strict=True):
        if text is None:
            with pytest.raises(InvalidRequest, match="no chat template named default, only: "):
                model.encode_chat(USER, 4096, tools)
        else:
            assert bytes(model.encode_chat(USER, 4096, tools)).decode() == text
    assert model.has_template is (expected[1] is not None)


@pytest.mark.parametrize("template", [5, [{"name": "x"}], ["x"], {"default": 5}, [], {}])
def test_a_template_of_another_form_is_the_checkpoints_fault_or_none(tmp_path, template):
    checkpoint(tmp_path, config={"chat_template": template})
    if template in ([], {}):
        assert not load_text_model(tmp_path).has_template
        return
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        load_text_model(tmp_path)


def test_a_template_that_is_no_text_is_named(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / JINJA).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load_text_model(tmp_path)


def test_all_templates_that_are_used_show_the_form_of_calls(tmp_path):
    named = {"default": "<think>", "tool_use": "[TOOL_CALLS]"}
    forms = load_text_model(checkpoint(tmp_path, config={"chat_template": named})).forms
    assert (forms.calls.name, forms.thinking is not None) == ("mistral", True)


def test_special_tokens_are_strings_or_objects(tmp_path):
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    config = {"bos_token": {"content": "B"}, "eos_token": "E", "pad_token": None}
    assert rendered(tmp_path, template, **config) == "BE"


def test_templates_written_for_transformers_work(tmp_path):
    template = (
        "{%- for m in messages %}\n"
        "    {% generation %}\n"
        "{{ m | tojson }}{{ strftime_now('%%') }}\n"
        "    {% endgeneration %}\n"
        "    {%- if add_generation_prompt %}{% break %}{% endif %}\n"
        "{%- endfor %}"
    )
    content = [{"role": "user", "content": "<é'>"}] * 2
    assert rendered(tmp_path, template, content) == """{"role": "user", "content": "<é'>"}%\n"""


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_raises_refuses_the_messages(tmp_path, template):
    with pytest.raises(InvalidRequest) as caught:
        rendered(tmp_path, template)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_a_template_that_does_not_compile_is_the_checkpoints_fault(tmp_path):
    with pytest.raises(CheckpointError, match="does not compile"):
        rendered(tmp_path, "{% for %}")


def test_without_a_template_chat_is_refused(tmp_path):
    model = load_text_model(checkpoint(tmp_path))
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.encode_chat(USER, 4096)


def test_the_tiny_tokenizer_has_one_token_for_each_byte():
    assert TOKENIZER.encode("é<|user|>").ids == [0xC3, 0xA9, 258]
    assert TOKENIZER.decode([0xC3, 0xA9, EOS]) == "é"
