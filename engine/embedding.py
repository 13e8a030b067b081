"""Recognises decoders that produce embeddings, from the files that sentence-transformers writes.

    modules.json            the steps: a Transformer, a Pooling, perhaps a Normalize
    1_Pooling/config.json   the tokens whose hidden states make the embedding
    config.json             its size, and if its first numbers alone are an embedding (Matryoshka)

Only the last token's state is served. This token attends to the whole text, so a cached prefix of
another text stays usable. Needs no torch, because gateways read these files too.

Sources: sentence-transformers, "Creating Custom Models"; vLLM, "Pooling models" (Matryoshka).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

MODULES = "modules.json"
_POOLING = "Pooling"
_KNOWN = ("Transformer", _POOLING, "Normalize")
_LAST_TOKEN = "pooling_mode_lasttoken"


@dataclass(frozen=True, slots=True)
class Embedding:
    """The way from hidden states to an embedding: the last token's state, scaled to length 1 if
    required.
    """

    is_normalized: bool
    size: int  # numbers in one full embedding
    is_matryoshka: bool = False  # True if a prefix of the embedding is an embedding too
    matryoshka_sizes: tuple[int, ...] = ()  # prefix sizes that clients may request; empty: all

    def takes(self, size: int) -> bool:
        """True if the first `size` numbers of an embedding are a valid embedding."""
        if size == self.size:
            return True
        if not self.is_matryoshka or not 1 <= size <= self.size:
            return False
        return not self.matryoshka_sizes or size in self.matryoshka_sizes


def embedding_of(directory: Path) -> Embedding | None:
    """Returns the embedding that a checkpoint computes; None if the checkpoint generates text.

    Raises CheckpointError for a model that computes embeddings of another kind.
    """
    path = directory / MODULES
    if not path.is_file():
        return None
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{path}: not a list of modules")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    unknown = next((kind for kind in kinds if kind not in _KNOWN), None)
    if unknown is not None:
        raise CheckpointError(f"{path}: a module of type {unknown} is not supported")
    if kinds.count(_POOLING) != 1:
        raise CheckpointError(f"{path}: {kinds.count(_POOLING)} modules of type Pooling, not 1")
    folder = str(modules[kinds.index(_POOLING)].get("path", ""))
    if folder == ".." or Path(folder).name != folder or "\0" in folder:
        raise CheckpointError(f"{path}: names {folder!r:.80}, which is no folder of the model")
    _check_pooling(directory / folder / "config.json")
    return _described(directory / "config.json", is_normalized="Normalize" in kinds)


def _described(path: Path, *, is_normalized: bool) -> Embedding:
    """Returns the embedding that a model's config.json describes. Raises CheckpointError."""
    config = _read(path)
    text = config.get("text_config", config) if isinstance(config, dict) else None
    size = text.get("hidden_size") if isinstance(text, dict) else None
    if not isinstance(size, int):
        raise CheckpointError(f"{path}: hidden_size is missing")
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(isinstance(each, int) for each in sizes):
        raise CheckpointError(f"{path}: matryoshka_dimensions is not a list of integers")
    is_matryoshka = bool(sizes) or config.get("is_matryoshka") is True
    return Embedding(is_normalized, size, is_matryoshka, tuple(sizes))


def _check_pooling(path: Path) -> None:
    """Raises CheckpointError unless the last token's state alone is the embedding."""
    config = _read(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not an object")
    modes = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on]
    if modes == [_LAST_TOKEN] or config.get("pooling_mode") == "lasttoken":
        return
    found = ", ".join(modes) or config.get("pooling_mode")
    raise CheckpointError(f"{path}: only {_LAST_TOKEN} is supported, and this has {found}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
