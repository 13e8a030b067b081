"""Checks that a checkpoint computes text or embeddings, by its description and its files.

A classifier or a reward model with tied embeddings loads as a decoder of text without a missing
weight, but its answers are nonsense. Its `architectures` reveal this, or weights that do not occur
in a decoder. Such weights are refused unless they are known to have no effect on the next token.
Otherwise the served model would not be the trained model. `engine.embedding` recognises models of
embeddings.

Error messages name unsupported features in the field's words. Every such message refers to the page
that lists the supported features.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engine.embedding import MODULES, embedding_of
from engine.errors import CheckpointError

log = logging.getLogger(__name__)

TEXT_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "WithLMHead")
OTHER_FILES = {  # files of other kinds of checkpoints, and what each file means
    "adapter_config.json": "an adapter beside its base; merge them into one checkpoint",
}
EMBEDS = "config_sentence_transformers.json"
LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
MAKES_NO_TOKEN = re.compile(
    r"\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$"  # causal masks of old checkpoints
    r"|(^|\.)mtp\."  # weights that predict the tokens after the next one
    r"|(^|\.)(vision|visual|audio|image)"  # parts of models that also accept images or sound
    r"|\.[kqv]v?_scale$"  # scales of a quantised KV cache
)
MAX_NAMES_SAID = 3


def check_purpose(path: Path, config: PreTrainedConfig) -> None:
    """Raises CheckpointError if the directory or its config reveals another purpose than text."""
    for name, meaning in OTHER_FILES.items():
        if (path / name).exists():
            raise CheckpointError(f"{path / name}: {meaning}")
    embedding = embedding_of(path)
    if (path / EMBEDS).exists() and embedding is None:
        raise CheckpointError(f"{path / EMBEDS}: a model of embeddings, and {MODULES} is missing")
    if not is_known(config) or config.is_encoder_decoder:
        raise refused("config.json", f"model_type {config.model_type!r} is not a decoder of text")
    named = config.architectures or ()
    if embedding is not None:
        _check_embeds(named)
    elif named and not any(_answers_with_text(name, config.model_type) for name in named):
        raise refused(
            "config.json", f"architectures has {named[0]}, which is not a decoder of text"
        )


def _check_embeds(named: Sequence[str]) -> None:
    """Raises CheckpointError unless a model of embeddings is a decoder, with or without a head."""
    heads = ("Model", *TEXT_ENDINGS)
    if named and not any(name.endswith(heads) for name in named):
        raise CheckpointError(f"config.json: architectures has {named[0]}, which is not a decoder")


def is_known(config: PreTrainedConfig) -> bool:
    """True if transformers has a text decoder for this type of model."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or sees(config)


def sees(config: PreTrainedConfig) -> bool:
    """True if the model accepts images or other inputs besides text."""
    return (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )


def _answers_with_text(architecture: str, model_type: str) -> bool:
    known = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type),
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type),
    )
    return architecture.endswith(TEXT_ENDINGS) or architecture in known


def check_left_over(path: Path, names: Iterable[str], config: PreTrainedConfig) -> None:
    """Raises CheckpointError for weights in the files that the model does not use.

    Logs such weights if they are known to make no difference.
    """
    num_layers = config.num_hidden_layers
    num_extra = getattr(config, "num_nextn_predict_layers", None) or 0
    wrong, beyond, harmless = [], [], []
    for name in sorted(names):
        layer = max(map(int, LAYER.findall(name)), default=-1)
        if MAKES_NO_TOKEN.search(name) or num_layers <= layer < num_layers + num_extra:
            harmless.append(name)
        elif layer >= num_layers:
            beyond.append(name)
        else:
            wrong.append(name)
    if beyond:
        raise CheckpointError(
            f"{path}: weights have {_said(beyond)}, though num_hidden_layers is {num_layers}"
        )
    if wrong:
        raise CheckpointError(f"{path}: the model has no place for the weights {_said(wrong)}")
    if harmless:
        log.info("%s: weights not used: %s", path, _said(harmless))


def _said(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SAID
    return ", ".join(names[:MAX_NAMES_SAID]) + (f" and {more} more" if more > 0 else "")


SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "mlp", "moe"})
STATE = "layers with a recurrent state"
LAYER_TYPES = {  # transformers' names of layer types, and the field's names
    "chunked_attention": "attention in chunks",
    "compressed_sparse_attention": "compressed sparse attention",
    "conv": "convolution layers with a state",
    "heavily_compressed_attention": "compressed attention",
    "hybrid": STATE,
    "hybrid_sliding": STATE,
    "indexed_attention": "sparse attention with an indexer (DSA)",
    "linear_attention": STATE,
    "minimax_m3_sparse": "sparse attention with an indexer",
    "recurrent": STATE,
}
TERMS = {  # tensors besides Q, K and V that a model's code may pass to its attention
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias in attention (ALiBi, T5)",
}
PAGE = "docs/users/models.md lists what is served"


def refused(where: str, why: str) -> CheckpointError:
    """Returns the error that refuses a model. It has the reason, and the page of supported
    features.
    """
    return CheckpointError(f"{where}: {why}; {PAGE}")


def unserved(where: str, feature: str, details: str) -> CheckpointError:
    """Returns the error that refuses an unsupported feature. `details` says how the feature was
    found.
    """
    return refused(where, f"{feature} cannot be served ({details})")


def check_config(config: PreTrainedConfig) -> None:
    """Raises CheckpointError for unsupported features that are visible in the config."""
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        if getattr(part, "use_bidirectional_attention", None) in (True, "all"):
            details = "use_bidirectional_attention is set"
            raise unserved("config.json", "bidirectional attention", details)
        if getattr(part, "is_causal", True) is False:
            raise unserved("config.json", "bidirectional attention", "is_causal is false")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS)
    if unknown:
        name = unknown[0]
        feature = LAYER_TYPES.get(name, f"a layer of type {name}")
        raise unserved("config.json", feature, f"layer_types has {name!r}")
    if getattr(text, "attention_chunk_size", None):
        raise unserved("config.json", "attention in chunks", "attention_chunk_size is set")


def names_of(terms: Iterable[str]) -> str:
    """Returns the names of attention terms that the model uses and PAGED lacks."""
    return ", ".join(sorted({TERMS.get(term, term) for term in terms}))
