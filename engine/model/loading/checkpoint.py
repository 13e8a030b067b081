"""Loads a model so that its attention runs over paged KV, or refuses the model.

transformers supports hundreds of decoders. Baton has no list of supported models. It tries each
model when the model is opened:

1. One token, with an attention that only records its arguments. Every layer must call the attention
   once, with the same number of KV heads and the same head size. These calls determine the
   `KVSection`, not names in the config. A layer's window must equal the window of its mask. A layer
   that attends to K and V of an earlier layer has no KV of its own.
2. A short row with eager and with sdpa attention: some models are causal in only one of the two.
3. The rows of `probe`, near and far: with the model's own attention, and in two passes over paged
   KV. The paged KV is fp32 or bf16 for every served format. The logits must agree. They differ if
   anything besides K and V passes from token to token (states of a recurrence or a convolution).
   They also differ if the attention has terms that PAGED lacks (biases, sinks, no causality), if
   positions are not taken from `position_ids`, or if other rows of a batch have an influence.

Code that changes the model later, for example to pack its weights, repeats the third trial.

A few tokens cannot reveal every property. Two properties are checked by name: attention in fixed
chunks, and rotary embeddings that change as a sequence grows (`positions`).

Of a model that also accepts images, only the part for text is served; the rest is dropped after
loading.

A CPU computes in fp32. There, weights stay in the dtype of their file until they are packed
(`stored`). So loading needs as much memory as the file, not as much as the model in fp32.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from engine.embedding import Embedding, embedding_of
from engine.errors import CheckpointError, ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention.hook import PAGED, RECORDING, AttentionCall, ForwardContext, attach
from engine.model.loading import probe
from engine.model.loading.files import check_files, fingerprint, read_json, weight_files
from engine.model.loading.gguf import lazy_weights
from engine.model.loading.layers import (
    cached_windows,
    check_calls,
    check_windows,
    places_of,
    section_of,
)
from engine.model.loading.positions import ContextLength, context_length, stretch
from engine.model.loading.probe import Probe, Watched, names_like, watching
from engine.model.loading.purpose import (
    check_config,
    check_left_over,
    check_purpose,
    names_of,
    refused,
    sees,
    unserved,
)
from engine.model.loading.stored import (
    as_stored,
    check_plain,
    one_device_maps,
    quant_method,
    require_packages,
    widen_in_use,
    widen_own,
)
from engine.model.parallel.group import RankGroup
from engine.model.parallel.slicing import cut
from engine.model.parallel.stages import keep_stage

log = logging.getLogger(__name__)

PROBE_TOLERANCE = {  # largest error, relative to the spread of the logits
    torch.float32: 1e-3,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
QUANTISED_TOLERANCE = 0.25  # larger, because rounded activations amplify small differences
CHANGE_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose attention uses the cache and the batch in `context`."""

    model: PreTrainedModel
    context: ForwardContext
    layout: KVLayout
    device: torch.device
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    quant_method: str | None  # quantisation method of the checkpoint's weights, or None
    # The trial, for repetition after changes; None: the model was built, not loaded.
    probe: Probe | None = None
    read_outside: frozenset[str] = frozenset()  # names of modules whose weights other modules read
    embedding: Embedding | None = None  # set if the model's outputs are hidden states, not logits
    group: RankGroup | None = None  # set if the model spans several ranks
    whole_layout: KVLayout | None = None  # layout of all ranks together; None: the same as `layout`


def load(  # noqa: PLR0913 - all but three have defaults
    path: Path,
    *,
    kv_format: KVFormat,
    block_size: int,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    group: RankGroup | None = None,
    max_len: int | None = None,
) -> LoadedModel:
    """Loads the checkpoint in `path`, for computation in `dtype`.

    The default `dtype` is bf16 on a GPU and fp32 on a CPU. On a CPU, weights keep the dtype of
    their file until `pack_linears` or `stored.widen`, and are fp32 only while they are used.

    Some rotary embeddings change with the length of a context. If `max_len` is long, those of the
    longest context may be used from the first token on (`positions`).

    With a `group`, loads this rank's part. All ranks must call this function together.

    Raises CheckpointError, in one line that names the file or the property. Raises ConfigError if
    the model cannot be divided among this number of ranks.
    """
    check_files(path)
    as_is = dtype is None and device == "cpu"
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    config = _load_config(path)
    check_purpose(path, config)
    check_config(config)
    length = _settle_length(path, config, max_len)
    method = _quant_method(config)
    context = ForwardContext()
    if group is not None:
        model = _load_part(path, config, dtype, group, method)
        if as_is:
            widen_in_use(model)
        else:
            model = model.to(device, dtype)
        group.await_loading()
        computed_in = dtype
    elif as_is and method is None:
        with as_stored():
            model = _load_weights(path, config, dtype, device)
        widen_in_use(model)
        computed_in = dtype
    else:
        model = _load_weights(path, config, dtype, device)
        computed_in = model.dtype
    _check_numbers(path, model)
    embedding = embedding_of(path)
    if embedding is not None:
        _give_hidden_states(model)
    attach(model, context)
    try:
        tolerance = max(PROBE_TOLERANCE[computed_in], QUANTISED_TOLERANCE if method else 0)
        with watching(model, widen_own) as seen:
            section, tried = _probe(model, context, computed_in, tolerance, length.served, group)
    except CheckpointError:
        raise
    except Exception as error:  # a model's code may raise anything: refuse the model
        raise CheckpointError(f"{_model_type(config)} fails: {_one_line(error)}") from error
    read_outside = names_like(model, seen.read)
    for name in read_outside:
        widen_own(model.get_submodule(name))
    if config.get_text_config(decoder=True) is not config:
        _drop_what_never_ran(model, seen)
    return LoadedModel(
        model=model,
        context=context,
        layout=_layout(section, kv_format, block_size),
        device=torch.device(device),
        context_len=length.served,
        vocab_size=_vocab_size(model, tried, embedding),
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint(path, dtype=str(dtype), is_stretched=length.is_stretched),
        quant_method=method,
        probe=tried,
        read_outside=read_outside,
        embedding=embedding,
        group=group,
        whole_layout=_layout(_whole(model, section, group), kv_format, block_size),
    )


def _load_part(
    path: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    group: RankGroup,
    method: str | None,
) -> PreTrainedModel:
    """Loads this rank's layers, and its slices of them, into host memory. Other weights are not
    read.
    """
    if method is not None:
        raise CheckpointError(f"{path}: weights in {method} cannot be shared by several ranks")
    with as_stored():
        model = _load_weights(path, config, dtype, "cpu")
    keep_stage(model, group, dtype)
    cut(model, group)
    return model


def _num_layers(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).num_hidden_layers


def _whole(model: PreTrainedModel, section: KVSection, group: RankGroup | None) -> KVSection:
    """Returns the KV shape of all ranks together, computed from this rank's shape."""
    if group is None:
        return section
    text = model.config.get_text_config(decoder=True)
    num_heads = section.num_kv_heads
    num_layers = section.num_layers if group.place.pp == 1 else _num_layers(model)
    total = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if group.place.tp > 1 and len(group.place.kv_heads(total)) == num_heads:
        num_heads = total
    return KVSection(num_layers, num_heads, section.head_dim)


def _give_hidden_states(model: PreTrainedModel) -> None:
    """Makes the model return its last hidden states [num_tokens, hidden] in place of logits.

    Packing, paged attention and the trial work as before. Raises CheckpointError if the logits
    depend on anything besides the head.
    """
    text = model.config.get_text_config(decoder=True)
    changing = next(
        (n for n in CHANGE_LOGITS if getattr(text, n, None) not in (None, 1, 1.0)), None
    )
    if changing is not None:
        raise CheckpointError(f"config.json: {changing} changes hidden states of embeddings")
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    model.set_submodule(name, torch.nn.Identity())


def _vocab_size(model: PreTrainedModel, tried: Probe, embedding: Embedding | None) -> int:
    """Returns the number of token ids that prompts may use."""
    if embedding is None:
        return tried.expected.shape[-1]
    return model.get_input_embeddings().num_embeddings


def load_draft(
    path: Path,
    *,
    target: LoadedModel,
    target_path: Path,
    dtype: torch.dtype | None,
    max_len: int | None = None,
) -> LoadedModel:
    """Loads the draft model of `target`, on the target's device and for the target's KV format.

    Raises CheckpointError, also if the two models use the same ids for different tokens. Then
    answers would be correct, but speculation useless. Raises ConfigError if the draft model cannot
    be divided among the ranks.
    """
    try:
        draft = load(
            path,
            kv_format=target.layout.kv_format,
            block_size=target.layout.block_size,
            device=str(target.device),
            dtype=dtype,
            group=target.group,
            max_len=max_len,
        )
    except ConfigError as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else ConfigError
        raise kind(f"draft: {error}") from error
    if draft.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"draft: {path}: logits of {draft.vocab_size} tokens, but {target_path} has "
            f"{target.vocab_size}"
        )
    if _vocabulary(path) != _vocabulary(target_path):
        raise CheckpointError(f"draft: {path / 'tokenizer.json'}: not the tokens of {target_path}")
    return draft


def _vocabulary(path: Path) -> object:
    """Returns the ids and texts of a tokenizer's tokens, without tokens that fine-tunes add."""
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
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config class may raise any exception
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{path / 'config.json'}: the model is code of its own (auto_map), which never runs"
            ) from error
        raise CheckpointError(f"{path / 'config.json'}: {_one_line(error)}") from error


def _settle_length(path: Path, config: PreTrainedConfig, max_len: int | None) -> ContextLength:
    """Returns the context length. If necessary, makes rotary embeddings independent of the
    length.
    """
    text = config.get_text_config(decoder=True)
    length = context_length(text, max_len)
    if length.limit is not None:
        log.warning("%s: %s", path, length.limit)
    if length.is_stretched:
        stretch(text)
    return length


def _quant_method(config: PreTrainedConfig) -> str | None:
    """Returns the quantisation method of the weights. Raises CheckpointError if packages for this
    method are missing.
    """
    method = quant_method(config)
    if method is not None:
        require_packages(method)
    return method


def _loader(path: Path, config: PreTrainedConfig) -> Callable[..., Any]:
    """Returns a function that loads the model from safetensors or from a GGUF file."""
    file = weight_files(path)[0]
    if file.suffix != ".gguf":
        kind = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
        return partial(kind.from_pretrained, path, use_safetensors=True, trust_remote_code=False)
    if sees(config):
        raise CheckpointError(f"{file}: a GGUF file holds a model of text only")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return partial(kind.from_pretrained, None, state_dict=lazy_weights(file))


def _load_weights(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    load_model = _loader(path, config)
    options = {} if device == "cpu" else {"device_map": {"": device}}
    try:
        with one_device_maps():
            model, info = load_model(
                config=config,
                dtype=dtype,
                local_files_only=True,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # mismatches are reported in `info`
                **options,
            )
    except Exception as error:  # a model's code or a quantiser may raise anything: refuse the model
        raise CheckpointError(f"{path}: {_one_line(error)}") from error
    if quant_method(config) is None:
        check_plain(path, info["unexpected_keys"])
    missing = set(info["missing_keys"])
    if embedding_of(path) is not None:
        missing -= _names_of_head(model)  # checkpoints of embedding models have no head
    if missing:
        raise CheckpointError(f"{path}: weights lack {min(missing)}")
    if info["mismatched_keys"]:
        name, found, wanted = min(info["mismatched_keys"])
        raise CheckpointError(
            f"{path}: {name} has shape {list(found)}, config.json says {list(wanted)}"
        )
    check_left_over(path, info["unexpected_keys"], config.get_text_config(decoder=True))
    return model.eval().requires_grad_(requires_grad=False)


def _names_of_head(model: PreTrainedModel) -> set[str]:
    """Returns the names of the weights that compute logits from hidden states."""
    head = model.get_output_embeddings()
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module is head
        for name, _ in module.named_parameters()
    }


@torch.inference_mode()
def _probe(
    model: PreTrainedModel,
    context: ForwardContext,
    dtype: torch.dtype,
    tolerance: float,
    context_len: int,
    group: RankGroup | None,
) -> tuple[KVSection, Probe]:
    """Tries the model, as the module's text describes. Returns its KV shape and the trial. Paged
    attention stays enabled.
    """
    where = probe.origins(model.config.get_text_config(decoder=True), context_len)
    kv_format = KVFormat.BF16 if dtype == torch.bfloat16 else KVFormat.FP32
    has_logits = group is None or group.place.is_last_stage
    tried = Probe(where, probe.own_logits(model, where), tolerance, kv_format, has_logits)
    _check_other_attention(model, tried, is_exact=dtype is torch.float32)
    calls = _recorded(model, context)
    own = _own_layers(model, group)
    is_whole = group is None or group.place.pp == 1
    check_calls(_model_type(model.config), calls, own, is_whole=is_whole)
    section = section_of(model.config, calls)
    context.places = places_of(calls)
    check_windows(calls, cached_windows(model.config), context_len)
    off = tried.error(_paged_logits(model, context, section, tried))
    if not off <= tolerance:
        raise _refusal(_model_type(model.config), calls, off)
    return section, tried


def _own_layers(model: PreTrainedModel, group: RankGroup | None) -> range:
    """Returns the layers that this rank computes."""
    num_layers = _num_layers(model)
    return range(num_layers) if group is None else group.place.layers(num_layers)


def _recorded(model: PreTrainedModel, context: ForwardContext) -> list[AttentionCall]:
    """Records the attention calls for one token. Paged attention stays enabled."""
    model.set_attn_implementation(RECORDING)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False)
    model.set_attn_implementation(PAGED)
    calls, context.calls = context.calls, []
    context.made.clear()
    return calls


def _check_numbers(path: Path, model: PreTrainedModel) -> None:
    """Raises CheckpointError for a weight that is NaN or infinity.

    The trial uses few experts and few rows of embeddings, so it might not use such a weight.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel():
            ends = torch.stack(torch.aminmax(weight if weight.itemsize > 1 else weight.float()))
            if not ends.isfinite().all():
                raise CheckpointError(f"{path}: the weight {name} has NaN or infinity")


def _check_other_attention(model: PreTrainedModel, tried: Probe, *, is_exact: bool) -> None:
    """Raises CheckpointError if transformers' sdpa and eager attention give different results.

    Some models lack causality in one of the two. Row 0 reveals this in one short pass. In 16 bits
    the two attentions round differently, and then a router may choose other experts.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not all(part._supports_sdpa for part in parts):
        return  # without sdpa attention transformers uses the eager one
    model.set_attn_implementation("sdpa")
    found = probe.own_logits(model, tried.origins[:1])
    tolerance = tried.tolerance if is_exact else QUANTISED_TOLERANCE
    if tried.has_logits and not probe.error(found, tried.expected[:1]) <= tolerance:
        raise unserved(
            _model_type(model.config),
            "attention whose answers depend on how transformers computes it",
            "eager and sdpa differ",
        )


def try_again(loaded: LoadedModel, tolerance: float) -> torch.Tensor:
    """Repeats the trial after the model's modules were changed, and returns its logits.

    Raises CheckpointError if the model now fails, or if its logits differ by more than `tolerance`.
    With an infinite tolerance, for rounded weights, it is enough that all logits are numbers.
    """
    model, kind = loaded.model, _model_type(loaded.model.config)
    if loaded.read_outside:
        names = ", ".join(sorted(loaded.read_outside))
        log.info("%s: not rounded, because other modules read the weights: %s", kind, names)
    section, tried = loaded.layout.sections[0], loaded.probe
    try:
        found = _paged_logits(model, loaded.context, section, tried)
    except Exception as error:  # a model's code may raise anything: refuse the model
        raise CheckpointError(f"{kind} fails over packed weights: {_one_line(error)}") from error
    off = tried.error(found)
    if not off <= max(tolerance, tried.tolerance):
        raise CheckpointError(f"{kind}: over packed weights its logits are off by {off:.2g}")
    return found


def _paged_logits(
    model: PreTrainedModel, context: ForwardContext, section: KVSection, tried: Probe
) -> torch.Tensor:
    """Returns the trial's logits, computed by the model's code over paged KV."""
    rows = len(tried.origins)
    device = str(model.device)
    with probe.probe_cache(context, section, tried.kv_format, num_rows=rows, device=device):
        return probe.paged_logits(probe.by_model(model, context), tried.origins)


def _drop_what_never_ran(model: PreTrainedModel, seen: Watched) -> None:
    """Removes the parts of the model that a pass over text does not use, such as towers for
    images.
    """
    for parent in (model, model.base_model):
        for name, child in list(parent.named_children()):
            if seen.ran.isdisjoint(child.modules()):
                log.info("%s: %s is not used for text", model.config.model_type, name)
                setattr(parent, name, None)


def _refusal(kind: str, calls: list[AttentionCall], off: float) -> CheckpointError:
    """Returns the error for a model whose logits over paged KV differ by `off`, with possible
    reasons.
    """
    if math.isnan(off):
        return CheckpointError(f"{kind}: its logits are not numbers")
    found = "over paged KV its logits differ"
    terms = frozenset().union(*(call.terms for call in calls))
    if terms:
        return unserved(kind, names_of(terms), found)
    return refused(
        kind,
        f"{found}: its attention or its positions are not like ours, or it keeps a state besides "
        "K and V",
    )


def _model_type(config: PreTrainedConfig) -> str:
    return f"config.json: model_type {config.model_type!r}"


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _one_line(error: Exception) -> str:
    """Returns an error's first line. If it ends with a colon, the second line is added."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, LookupError):  # a LookupError's text is a name alone
        return f"{type(error).__name__} {' '.join(lines)}".strip()
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
