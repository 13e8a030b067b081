"""Loading a model so that its attention runs over paged KV, and refusing one whose cannot.

transformers knows hundreds of decoders. Baton does not keep a list of those that it can serve; it
tries the model when it is opened:

1. One token, with an attention that only records. Every layer must call it once, all with the same
   KV heads and head size: from these calls, not from names in the config, comes the `KVSection`.
   The window that a layer tells its attention must be that of its mask.
2. A few tokens with the model's own attention, and the same tokens in two chunks over paged KV,
   in fp32 or bf16 whatever format is served. The logits must agree. They do not if anything besides
   K and V passes from token to token (states of a recurrence or a convolution), if the attention
   has terms that ours does not (biases, sinks, no causality), or if positions are not taken from
   `position_ids`.

What a few tokens cannot show is checked by name: attention in fixed chunks, and rotary embeddings
that change with the length of the batch. The latter are constant up to a length, which is then
the context length served.

For a CPU, which computes in fp32, weights stay in the dtype of their file until they are packed
(`stored`): loading takes the memory of the file, not of the model in fp32.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from engine.batch import Row
from engine.blocks import BlockId
from engine.errors import CheckpointError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import SeqId
from engine.model.attention import build_batch
from engine.model.files import check_files, fingerprint, read_json, weight_files
from engine.model.hook import PAGED, RECORDING, Call, ForwardContext, attach, forward
from engine.model.kvcache import KVCache, allocate_buffer
from engine.model.quantised import quant_method, require_packages
from engine.model.stored import as_stored, widen_in_use

PROBE_CHUNKS = ((5, 3, 8, 7), (2, 9, 4))  # token ids; the cut is inside a block of the probe
PROBE_BLOCK_SIZE = 3
PROBE_TOLERANCE = {  # of the spread of the logits
    torch.float32: 1e-3,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
QUANTISED_TOLERANCE = 0.25  # rounded activations turn small differences into larger ones
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose attention reads the cache and batch in `context`."""

    model: PreTrainedModel
    context: ForwardContext
    layout: KVLayout
    device: torch.device
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    quant_method: str | None  # how the checkpoint's weights are quantised


def load(
    path: Path,
    *,
    kv_format: KVFormat,
    block_size: int,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Loads the checkpoint in `path`, to be computed with in `dtype`.

    Without one, that is bf16 on a GPU; on a CPU it is fp32, though weights are kept as they are
    stored and made fp32 only while they are in use, until `pack_linears` or `stored.widen`.

    Raises CheckpointError, in one line that names the file or the property.
    """
    check_files(path)
    as_is = dtype is None and device == "cpu"
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config = _load_config(path)
    _check_config(config)
    method = _quant_method(path, config)
    if as_is and method is None:
        with as_stored():
            model = _load_weights(path, config, dtype, device)
        widen_in_use(model)
        computed_in = dtype
    else:
        model = _load_weights(path, config, dtype, device)
        computed_in = model.dtype
    context = ForwardContext()
    attach(model, context)
    try:
        tolerance = max(PROBE_TOLERANCE[computed_in], QUANTISED_TOLERANCE if method else 0)
        section, vocab_size = _probe(model, context, computed_in, tolerance)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a model's code raises: it cannot be served
        raise CheckpointError(f"{_model_type(config)} fails: {_first_line(error)}") from error
    return LoadedModel(
        model=model,
        context=context,
        layout=_layout(section, kv_format, block_size),
        device=torch.device(device),
        context_len=_context_len(model.config.get_text_config(decoder=True)),
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint(path, dtype=str(dtype)),
        quant_method=method,
    )


def load_draft(
    path: Path, *, target: LoadedModel, target_path: Path, dtype: torch.dtype | None
) -> LoadedModel:
    """Loads the model that is to propose tokens to `target`: on its device, for its KV format.

    Raises CheckpointError, also where the two mean different tokens by the same ids: speculation
    would be right, but in vain.
    """
    try:
        draft = load(
            path,
            kv_format=target.layout.kv_format,
            block_size=target.layout.block_size,
            device=str(target.device),
            dtype=dtype,
        )
    except CheckpointError as error:
        raise CheckpointError(f"draft: {error}") from error
    if draft.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"draft: {path}: logits of {draft.vocab_size} tokens, those of {target_path} are of "
            f"{target.vocab_size}"
        )
    if _vocabulary(path) != _vocabulary(target_path):
        raise CheckpointError(f"draft: {path / 'tokenizer.json'}: not the tokens of {target_path}")
    return draft


def _vocabulary(path: Path) -> object:
    """Ids and texts of a tokenizer's tokens; without those added later, as fine-tunes do."""
    tokenizer = read_json(path, "tokenizer.json")
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None


def _layout(section: KVSection, kv_format: KVFormat, block_size: int) -> KVLayout:
    try:
        return KVLayout(block_size=block_size, kv_format=kv_format, sections=(section,))
    except ValueError as error:
        raise CheckpointError(f"config.json: head_dim is {section.head_dim}: {error}") from None


def _load_config(path: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a config class may raise anything
        raise CheckpointError(f"{path / 'config.json'}: {_first_line(error)}") from error


def _check_config(config: PreTrainedConfig) -> None:
    """Raises CheckpointError for what can be told from the config alone."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise CheckpointError(f"{_model_type(config)} is not a decoder of text")
    text = config.get_text_config(decoder=True)
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types has {unknown[0]!r}, which has no paged form"
        )
    if getattr(text, "attention_chunk_size", None):
        raise CheckpointError("config.json: attention_chunk_size is not supported")


def _quant_method(path: Path, config: PreTrainedConfig) -> str | None:
    """How the weights are quantised, if transformers has what it needs to load them."""
    method = "gguf" if _gguf_names(path) else quant_method(config)
    if method is not None:
        require_packages(method)
    return method


def _gguf_names(path: Path) -> list[str]:
    return [file.name for file in weight_files(path) if file.suffix == ".gguf"]


def _load_weights(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    gguf = _gguf_names(path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported in `info`
            **({"gguf_file": gguf[0]} if gguf else {}),
        )
        model = model.to(device)
    except Exception as error:  # whatever a model's code or a quantiser raises: it cannot be served
        raise CheckpointError(f"{path}: {_first_line(error)}") from error
    if info["missing_keys"]:
        raise CheckpointError(f"{path}: weights lack {min(info['missing_keys'])}")
    if info["mismatched_keys"]:
        name, found, wanted = min(info["mismatched_keys"])
        raise CheckpointError(
            f"{path}: {name} has shape {list(found)}, config.json says {list(wanted)}"
        )
    return model.eval().requires_grad_(requires_grad=False)


@torch.inference_mode()
def _probe(
    model: PreTrainedModel, context: ForwardContext, dtype: torch.dtype, tolerance: float
) -> tuple[KVSection, int]:
    """Tries the model, as told above, and leaves it with paged attention: KV shape, vocabulary."""
    device = model.device
    ids = torch.tensor([sum(PROBE_CHUNKS, ())], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
    model.set_attn_implementation(RECORDING)
    model(input_ids=ids[:, :1], position_ids=positions[:, :1], use_cache=False)
    model.set_attn_implementation(PAGED)
    calls, context.calls = context.calls, []
    section = _section(model, calls)
    _check_windows(calls, _context_len(model.config.get_text_config(decoder=True)))
    found = _chunk_logits(model, context, section, dtype)
    if not (found - expected).abs().max() <= tolerance * expected.std():
        who = _model_type(model.config)
        raise CheckpointError(f"{who}: over paged KV its logits are not its own: {_why(calls)}")
    return section, expected.shape[1]


def _why(calls: list[Call]) -> str:
    """What may make a model's attention differ from ours."""
    terms = sorted(set().union(*(call.terms for call in calls)))
    if terms:
        return f"its attention has terms that ours has not: {', '.join(terms)}"
    return "its attention or its positions are not like ours, or it keeps a state besides K and V"


def _section(model: PreTrainedModel, calls: list[Call]) -> KVSection:
    """The KV shape, from what each layer asked of its attention."""
    who = _model_type(model.config)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if not calls:
        raise CheckpointError(
            f"{who}: its attention cannot be replaced by one over paged KV: its code in "
            "transformers does not use the attention interface"
        )
    if sorted(call.layer for call in calls) != list(range(num_layers)):
        raise CheckpointError(
            f"{who}: {len(calls)} calls to attention, though num_hidden_layers is {num_layers}"
        )
    if any(call.has_own_mask for call in calls):
        raise CheckpointError(f"{who}: its attention makes a mask of its own")
    shapes = {shape for call in calls for shape in (call.key_shape, call.value_shape)}
    if len(shapes) > 1:
        raise CheckpointError(f"{who}: K or V differ in (heads, head_dim): {sorted(shapes)}")
    num_kv_heads, head_dim = shapes.pop()
    return KVSection(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _check_windows(calls: list[Call], context_len: int) -> None:
    """Raises CheckpointError where, within the context, a layer's mask hides what it says to see.

    The probe's few tokens do not reach the end of a window.
    """
    for call in calls:
        said, masked = (min(n or context_len, context_len) for n in (call.window, call.mask_window))
        if said != masked:
            raise CheckpointError(
                f"config.json: the mask of layer {call.layer} shows {masked} tokens, but its "
                f"attention is told {said}"
            )


def _chunk_logits(
    model: PreTrainedModel, context: ForwardContext, section: KVSection, dtype: torch.dtype
) -> torch.Tensor:
    """Logits [num_tokens, vocab] of the probe's tokens, chunk by chunk over paged KV."""
    kv_format = KVFormat.BF16 if dtype == torch.bfloat16 else KVFormat.FP32
    layout = KVLayout(block_size=PROBE_BLOCK_SIZE, kv_format=kv_format, sections=(section,))
    context.cache = KVCache(layout, allocate_buffer(layout, 3, str(model.device)))
    found = []
    start = 0
    for ids in PROBE_CHUNKS:
        row = Row(SeqId("probe"), ids, start, [BlockId(2), BlockId(0), BlockId(1)], None)
        context.batch = build_batch([row], context.cache)
        found.append(forward(model, ids, range(start, row.end), range(len(ids))))
        start = row.end
    context.cache = context.batch = None
    return torch.cat(found).float()


def _model_type(config: PreTrainedConfig) -> str:
    return f"config.json: model_type {config.model_type!r}"


def _context_len(text: PreTrainedConfig) -> int:
    """The longest context in which every token's position is embedded the same way."""
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise CheckpointError("config.json: max_position_embeddings is missing")
    rope = getattr(text, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in per_layer_type or [rope]:
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            length = min(length, parameters.get("original_max_position_embeddings") or length)
    return length


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
