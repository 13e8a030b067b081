"""How attention layers of a transformers model reach the paged KV cache.

transformers lets a model's attention be replaced by a registered function, which gets the attention
module and the projected query, key and value. What else it needs, the cache and the batch, is in a
`ForwardContext` that `attach` puts on every module of the model, once, as the attribute `baton`.

Why so, and not as a keyword of `model(...)`: whether keywords reach the attention is up to each
model's code, while every model passes the module. One model has one context, so two models (a
target and its draft) in one process do not meet; one model runs one batch at a time.

No mask function is registered under the name, so transformers builds no mask: rows, causality and
windows are ours to keep apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

from engine.model.attention import AttentionBatch, Scoring, paged_attention
from engine.model.kvcache import KVCache

IMPLEMENTATION = "baton_paged"


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer asked of its attention. K and V shapes are (num_kv_heads, head_dim)."""

    layer: int
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    has_mask: bool  # a mask that the model makes itself


@dataclass(slots=True)
class ForwardContext:
    """The batch that a model computes now. Without a cache, layers only record their calls."""

    cache: KVCache | None = None
    batch: AttentionBatch | None = None
    calls: list[Call] = field(default_factory=list)


def attach(model: torch.nn.Module, context: ForwardContext) -> None:
    """From now on the model's attention uses `context`."""
    for module in model.modules():
        module.baton = context


def forward(
    model: torch.nn.Module, token_ids: Sequence[int], positions: Sequence[int], keep: Sequence[int]
) -> torch.Tensor:
    """Logits [len(keep), vocab] of the tokens whose indices are in `keep`, with paged attention."""
    device = model.device
    ids, where = torch.tensor([token_ids, positions], device=device)[:, None]  # [1, num_tokens]
    kept = torch.tensor(keep, dtype=torch.long, device=device)
    logits = model(input_ids=ids, position_ids=where, use_cache=False, logits_to_keep=kept).logits
    if logits.shape[1] != len(keep):  # a model that does not know logits_to_keep
        logits = logits[:, kept]
    return logits[0]


def attention_hook(  # noqa: PLR0913
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Writes K and V to the cache and attends over it: [1, num_tokens, num_heads, head_dim]."""
    context: ForwardContext = module.baton
    query = query[0].transpose(0, 1)  # [num_tokens, num_heads, head_dim]
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if context.cache is None:
        shapes = tuple(key.shape[1:]), tuple(value.shape[1:])
        context.calls.append(Call(module.layer_idx, *shapes, attention_mask is not None))
        return query.new_zeros(1, *query.shape[:2], value.shape[2]), None
    if scaling is None:
        scaling = query.shape[2] ** -0.5
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    scoring = Scoring(scaling, window or None, softcap)
    context.cache.write(module.layer_idx, context.batch.write_rows, key, value)
    result = paged_attention(query, context.cache, module.layer_idx, context.batch, scoring)
    return result[None], None


AttentionInterface.register(IMPLEMENTATION, attention_hook)
