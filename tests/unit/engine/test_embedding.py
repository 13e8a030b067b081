"""Embedding models are recognised by their files; unsupported kinds are refused."""

import json

import pytest

from engine.embedding import Embedding, embedding_of
from engine.errors import CheckpointError

MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


@pytest.fixture
def saved(tmp_path):
    def save(modules=MODULES, pooling=LAST, config=None):
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        for name, value in (
            ("modules.json", modules),
            ("1_Pooling/config.json", pooling),
            ("config.json", {"hidden_size": 8} if config is None else config),
        ):
            (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return save


def test_a_checkpoint_without_modules_gives_text(tmp_path):
    assert embedding_of(tmp_path) is None


def test_the_last_token_is_the_embedding(saved):
    assert embedding_of(saved()) == Embedding(is_normalized=True, size=8)
    assert embedding_of(saved(MODULES[:2])) == Embedding(is_normalized=False, size=8)
    older = {"pooling_mode": "lasttoken", "word_embedding_dimension": 8}
    assert embedding_of(saved(pooling=older)) is not None
    text = {"text_config": {"hidden_size": 16}}
    assert embedding_of(saved(config=text)).size == 16


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"modules": {}}, "not a list of modules"),
        ({"modules": [*MODULES, {"type": "models.Dense"}]}, "Dense is not supported"),
        ({"modules": MODULES[:1]}, "0 modules of type Pooling"),
        ({"pooling": []}, "not an object"),
        ({"pooling": {"pooling_mode_mean_tokens": True}}, "this has pooling_mode_mean_tokens"),
        ({"pooling": LAST | {"pooling_mode_cls_token": True}}, "only pooling_mode_lasttoken"),
        ({"config": {}}, "hidden_size is missing"),
        ({"config": {"hidden_size": 8, "matryoshka_dimensions": 4}}, "not a list of integers"),
    ],
)
def test_other_kinds_are_refused(saved, files, reason):
    with pytest.raises(CheckpointError, match=reason):
        embedding_of(saved(**files))


def test_a_part_is_an_embedding_only_where_the_model_says_so(saved):
    plain = embedding_of(saved())
    nested = embedding_of(saved(config={"hidden_size": 8, "is_matryoshka": True}))
    listed = embedding_of(saved(config={"hidden_size": 8, "matryoshka_dimensions": [2, 4]}))
    taken = [[size for size in range(10) if each.takes(size)] for each in (plain, nested, listed)]
    assert taken == [[8], [1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 8]]


@pytest.mark.parametrize("folder", ["../1_Pooling", "/etc", "..", "a/b", "x\0"])
def test_a_module_is_a_folder_of_the_model(saved, folder):
    modules = [MODULES[0], MODULES[1] | {"path": folder}]
    with pytest.raises(CheckpointError, match="which is no folder of the model"):
        embedding_of(saved(modules=modules))
