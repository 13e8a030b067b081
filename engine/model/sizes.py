"""Estimates the sizes of a loaded model, from its config and its weights, for MFU.

Configs use different names for the same number, and some have one number for each layer. Here the
mean of a list is used, and a value that is not a number is ignored: a missing size never keeps a
model from serving.
"""

from torch import nn
from transformers import PreTrainedConfig

from engine.layout import KVLayout
from engine.model.loading.checkpoint import LoadedModel
from engine.model.parallel.group import RankGroup
from engine.worker.steps import ModelSizes

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
PARTS = ("ffn_config",)  # nested parts of a config that may contain the sizes


def sizes_of(model: LoadedModel) -> ModelSizes:
    """Returns the sizes of a model, without the bytes of its weights.

    Only the experts that the model chooses for a token count. If the config lacks the number of
    attention heads, the size of attention is zero.
    """
    config, module = model.model.config.get_text_config(decoder=True), model.model
    share = share_of_experts(config)
    heads = number_of(config, "num_attention_heads") or 0.0
    hidden = number_of(config, "hidden_size") or 0.0
    head_dim = number_of(config, "head_dim") or (hidden // heads if heads else 0.0)
    num_slices = 1 if model.group is None else model.group.place.tp
    num_attending = len(model.context.places) or sum(s.num_layers for s in model.layout.sections)
    output = module.get_output_embeddings()
    # The head of a model of embeddings is an identity.
    head = getattr(getattr(output, "linear", output), "weight", None)
    tables = {id(x.weight) for x in module.modules() if isinstance(x, nn.Embedding)}
    layers = sum(
        parameter.numel() * (share if ".experts." in name else 1.0)
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1 and parameter is not head and id(parameter) not in tables
    )
    return ModelSizes(
        layer_weights=layers,
        head_weights=0 if head is None else head.numel(),
        attention_size=heads / num_slices * head_dim * num_attending,
        weights_bytes=0.0,
        kv_token_bytes=model.layout.block_bytes / model.layout.block_size,
    )


def of_all_ranks(sizes: ModelSizes, group: RankGroup, layout: KVLayout) -> ModelSizes:
    """Returns the sum of the ranks' sizes. Weights that several ranks have are counted several
    times.
    """
    parts = (sizes.layer_weights, sizes.head_weights, sizes.attention_size, sizes.weights_bytes)
    return ModelSizes(*map(group.total, parts), layout.block_bytes / layout.block_size)


def share_of_experts(config: PreTrainedConfig) -> float:
    """Returns the share of the experts that a token uses, at most 1. Returns 1 if the config does
    not contain it.
    """
    places = (config, *(getattr(config, part, None) for part in PARTS))
    chosen, total = (
        next((n for at in places for key in keys if (n := number_of(at, key))), None)
        for keys in (CHOSEN, EXPERTS)
    )
    return min(1.0, chosen / total) if chosen and total else 1.0


def number_of(config: object, key: str) -> float | None:
    """Returns the config's number of this name, or the mean if it is a list of numbers; None
    otherwise.
    """
    value = getattr(config, key, None)
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values or not all(type(each) in (int, float) for each in values):
        return None
    return sum(values) / len(values)
