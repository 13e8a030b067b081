"""Names of unsupported features, in the field's words, for error messages.

Every such message points to the page that lists the supported features.
"""

from collections.abc import Iterable

from transformers import PreTrainedConfig

from engine.errors import CheckpointError

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "mlp", "moe"})
STATE = "layers with a recurrent state"
LAYER_TYPES = {  # transformers' names of layer types, and ours
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
TERMS = {  # tensors that a model's code gives its attention besides Q, K and V
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias in attention (ALiBi, T5)",
}
PAGE = "docs/users/models.md lists what is served"


def refused(where: str, why: str) -> CheckpointError:
    """Returns the error that refuses a model: the reason, and the page of supported features."""
    return CheckpointError(f"{where}: {why}; {PAGE}")


def unserved(where: str, feature: str, details: str) -> CheckpointError:
    """Returns the error that refuses a feature. `details` says how the feature was found."""
    return refused(where, f"{feature} cannot be served ({details})")


def check_config(config: PreTrainedConfig) -> None:
    """Raises CheckpointError for unsupported features that the config alone shows."""
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
    """Returns the names of attention terms that the model uses and our attention lacks."""
    return ", ".join(sorted({TERMS.get(term, term) for term in terms}))
