"""Makes the attention layers of a transformers model use the paged KV cache.

transformers allows a registered function to replace a model's attention. The function receives the
attention module and the projected query, key and value. It also needs the cache and the batch. Both
are in a `ForwardContext`. `attach` sets the context once on every module of the model, as the
attribute `baton`.

A keyword of `model(...)` would not work: each model's code decides if keywords reach the attention,
while every model passes the module. Each model has its own context, so two models (a target and its
draft) can run in one process. One model runs one batch at a time.

Two functions are registered. PAGED is the attention of serving. No mask function is registered
under this name, so transformers builds no mask. PAGED itself separates rows and applies causality
and windows. RECORDING only records the arguments of each layer's attention, and the window of the
mask that transformers would have built. Without Baton the mask determines what a query attends to,
while PAGED relies on the layer's arguments. So the two must be compared.

Some layers compute no K and V, but attend to K and V of an earlier layer. They share the cache
place of that layer, so that nothing is stored twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from engine.model.attention import plain as torch_attention
from engine.model.attention.base import Attend, AttentionBatch, Scoring
from engine.model.attention.kvcache import KVCache

PAGED = "baton_paged"
RECORDING = "baton_recording"
MASK_SHAPE = (1, 1, 1, 1)
UNKNOWN_CONTEXT_LEN = 4096

# (batch, head, query, key) indices → True if the query attends to the key
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
KNOWN = frozenset({"position_ids"})  # tensor arguments of a layer that PAGED may ignore


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one layer's attention. Shapes of K and V are (num_kv_heads, head_dim)."""

    layer: int
    source: int  # the layer that computed K and V: this layer, or an earlier layer that shares them
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    window: int | None
    mask_window: int | None  # the mask's window; equal to `window` if the layer has no mask
    has_own_mask: bool  # True if the model builds its own mask
    terms: frozenset[str]  # names of further tensor arguments, which PAGED ignores


@dataclass(slots=True)
class ForwardContext:
    """The cache and the batch that a model computes now."""

    cache: KVCache | None = None
    batch: AttentionBatch | None = None
    attend: Attend = torch_attention.attend
    calls: list[AttentionCall] = field(default_factory=list)  # calls recorded under RECORDING
    # K and V of each layer under RECORDING, to find layers that share them.
    made: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    # Cache places of layers, if a layer's place is not its index.
    places: dict[int, int] = field(default_factory=dict)


def attach(model: torch.nn.Module, context: ForwardContext) -> None:
    """Makes the model's attention use `context` from now on."""
    for module in model.modules():
        module.baton = context


def forward(
    model: torch.nn.Module, token_ids: Sequence[int], positions: Sequence[int], keep: Sequence[int]
) -> torch.Tensor:
    """Computes logits [len(keep), vocab] with paged attention, for the tokens whose indices are in
    `keep`.
    """
    device = model.device
    ids, where = torch.tensor([token_ids, positions], device=device)[:, None]  # [1, num_tokens]
    kept = torch.tensor(keep, dtype=torch.long, device=device)
    logits = model(input_ids=ids, position_ids=where, use_cache=False, logits_to_keep=kept).logits
    if logits.shape[1] != len(keep):  # the model has ignored `logits_to_keep`
        logits = logits[:, kept]
    return logits[0]


def paged_hook(  # noqa: PLR0913 - as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Writes K and V to the cache and attends. Returns [1, num_tokens, num_heads, head_dim]."""
    context: ForwardContext = module.baton
    # [num_tokens, num_heads, head_dim].
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if scaling is None:
        scaling = query.shape[2] ** -0.5
    scoring = Scoring(scaling, _window(module, kwargs), softcap)
    layer = module.layer_idx
    where = context.cache, context.places.get(layer, layer), context.batch
    return context.attend(query, key, value, *where, scoring)[None], None


def recording_hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Records the call's arguments. Returns zeros in the shape of `paged_hook`'s result."""
    window = mask_window = _window(module, kwargs)
    has_own_mask = attention_mask is not None and attention_mask.shape != MASK_SHAPE
    if attention_mask is not None and not has_own_mask:
        mask_window = int(attention_mask.item()) or None
    module.baton.calls.append(
        AttentionCall(
            layer=module.layer_idx,
            source=_source(module.baton, module.layer_idx, key, value),
            key_shape=(key.shape[1], key.shape[3]),
            value_shape=(value.shape[1], value.shape[3]),
            window=window,
            mask_window=mask_window,
            has_own_mask=has_own_mask,
            terms=frozenset(k for k, v in kwargs.items() if isinstance(v, torch.Tensor)) - KNOWN,
        )
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _source(context: ForwardContext, layer: int, key: torch.Tensor, value: torch.Tensor) -> int:
    """Returns the earlier layer that passed the same K and V; `layer` itself if they are new."""
    for earlier, its_key, its_value in context.made:
        if its_key is key and its_value is value:
            return earlier
    context.made.append((layer, key, value))
    return layer


def recording_mask(
    *,
    device: torch.device,
    mask_function: MaskFunction,
    config: PreTrainedConfig,
    local_size: int | None = None,
    **_: object,
) -> torch.Tensor:
    """Returns the mask's window in place of a mask under RECORDING; 0 if the mask has no window.

    If a mask hides other tokens than future tokens and tokens outside the window, the returned
    value has another shape.
    """
    context_len = getattr(config, "max_position_embeddings", None) or UNKNOWN_CONTEXT_LEN
    shows = _shown(mask_function, local_size, context_len, device)
    shape = MASK_SHAPE if shows else (*MASK_SHAPE, 1)
    return torch.full(shape, float(local_size or 0), device=device)


def _shown(
    mask_function: MaskFunction, window: int | None, context_len: int, device: torch.device
) -> bool:
    """True if each query attends to itself and to all earlier tokens within its window.

    Tries queries and keys around every power of two in the context, and around the window.
    """
    powers = [1 << i for i in range(context_len.bit_length())]
    near = [n + i for n in (*powers, window or 0, context_len - 1) for i in (-1, 0, 1)]
    query = torch.tensor(sorted({n for n in near if 0 <= n < context_len}), device=device)
    distance = torch.cat([query, -query])
    query, distance = torch.meshgrid(query, distance, indexing="ij")
    key = query - distance
    inside = (key >= 0) & (key < context_len)
    query, key, distance = query[inside], key[inside], distance[inside]
    zero = torch.zeros((), dtype=torch.long, device=device)
    expected = (distance >= 0) & (distance < (window or context_len))
    found = mask_function(zero, zero, query, key)
    return bool((found == expected).all())


def _window(module: torch.nn.Module, kwargs: dict[str, object]) -> int | None:
    return kwargs.get("sliding_window", getattr(module, "sliding_window", None)) or None


AttentionInterface.register(PAGED, paged_hook)
AttentionInterface.register(RECORDING, recording_hook)
AttentionMaskInterface.register(RECORDING, recording_mask)
