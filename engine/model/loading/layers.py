"""Reads the attention parameters of each layer from recorded calls, and compares them with the
config.

The trial has too few tokens to fill a window. Instead, three sizes of each window are compared: the
arguments of the attention, of the mask, and of transformers' own cache.
"""

from collections import Counter
from collections.abc import Sequence

from transformers import DynamicCache, PreTrainedConfig

from engine.layout import KVSection
from engine.model.attention.hook import AttentionCall
from engine.model.loading.purpose import refused, unserved


def places_of(calls: Sequence[AttentionCall]) -> dict[int, int]:
    """Returns the cache place of each layer with attention. Layers that share K and V share a
    place.
    """
    sources = dict.fromkeys(call.source for call in calls)
    index = {layer: place for place, layer in enumerate(sorted(sources))}
    return {call.layer: index[call.source] for call in calls}


def check_calls(kind: str, calls: Sequence[AttentionCall], own: range, *, is_whole: bool) -> None:
    """Raises CheckpointError unless each layer attends at most once, and all masks are of one kind.

    If this rank has all layers (`is_whole`), there may be layers without attention, such as an MLP.
    """
    if not calls:
        raise refused(
            kind,
            "its attention cannot be replaced by one over paged KV: its code in transformers "
            "does not use the attention interface",
        )
    counts = Counter(call.layer for call in calls)
    layer, most = counts.most_common(1)[0]
    if most > 1:
        raise refused(kind, f"layer {layer} calls attention {most} times")
    if not counts.keys() <= set(own) or not (is_whole or len(counts) == len(own)):
        raise refused(
            kind, f"{len(calls)} layers call attention, though num_hidden_layers is {len(own)}"
        )
    if any(call.has_own_mask for call in calls):
        raise refused(kind, "its attention builds its own mask")
    if not is_whole and any(call.source != call.layer for call in calls):
        raise refused(kind, "layers that share KV cannot be split into stages")


def section_of(config: PreTrainedConfig, calls: Sequence[AttentionCall]) -> KVSection:
    """Returns the KV shape of the layers that made these calls. Raises CheckpointError if their
    shapes differ.
    """
    shapes = {shape for call in calls for shape in (call.key_shape, call.value_shape)}
    if len(shapes) > 1:
        text = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None):
            feature = "MLA (latent KV)"
        elif any(call.key_shape != call.value_shape for call in calls):
            feature = "K and V of different sizes"
        else:
            feature = "layers with KV of different sizes"
        details = f"K or V differ in (heads, head_dim): {sorted(shapes)}"
        raise unserved(f"config.json: model_type {config.model_type!r}", feature, details)
    num_kv_heads, head_dim = shapes.pop()
    return KVSection(len({call.source for call in calls}), num_kv_heads, head_dim)


def cached_windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """Returns the number of tokens that each layer gets from transformers' own cache; None means
    all.
    """
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(layers)}


def check_windows(
    calls: Sequence[AttentionCall], cached: dict[int, int | None], context_len: int
) -> None:
    """Raises CheckpointError if a layer's window, within the context, differs from the window of
    its mask or its cache. A layer that shares K and V uses the cache of the layer that computed
    them.
    """
    for call in calls:
        windows = call.window, call.mask_window, cached.get(call.source)
        said, masked, kept = (min(n or context_len, context_len) for n in windows)
        if said != masked:
            raise refused(
                "config.json",
                f"the mask of layer {call.layer} shows {masked} tokens, but its attention is told "
                f"{said}",
            )
        if said != kept:
            raise refused(
                "config.json",
                f"the cache of layer {call.layer} keeps {kept} tokens, but its attention is told "
                f"{said}",
            )
