"""Structures of `src/kernels`, field by field.

Structures contain addresses, so the code that makes one must keep the tensors alive (`keep`).
"""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

from engine.native.library import Native

FP32, BF16, INT8, INT8_AS_FLOAT, BF16_PAIRS = range(5)  # kinds of packed weights


class Weight(Structure):
    """A packed matrix."""

    _fields_ = (
        ("kind", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("padded_cols", c_int32),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
    )


class NativeScoring(Structure):
    """The way in which queries and keys become scores. A value of 0 switches a parameter off."""

    _fields_ = (("scaling", c_float), ("softcap", c_float), ("window", c_int32))


class Layer(Structure):
    """One decoder layer."""

    _fields_ = (
        ("qkv", Weight * 3),
        ("output", Weight),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("post_feed_forward_norm", c_void_p),
        ("scoring", NativeScoring),
        ("rope", c_int32),
        ("num_qkv", c_int32),
    )


class Rope(Structure):
    """Rotary embeddings."""

    _fields_ = (("inverse_frequencies", c_void_p), ("scale", c_float), ("rotary_dim", c_int32))


class Model(Structure):
    """A decoder."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("ropes", POINTER(Rope)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", Weight),
        ("num_layers", c_int32),
        ("num_ropes", c_int32),
        ("hidden", c_int32),
        ("num_heads", c_int32),
        ("feed_forward", c_int32),
        ("embedding_kind", c_int32),
        ("activation", c_int32),
        ("epsilon", c_float),
        ("embedding_scale", c_float),
        ("logit_softcap", c_float),
    )


class Cache(Structure):
    """One section of a buffer of KV blocks."""

    _fields_ = (
        ("blocks", c_void_p),
        ("block_bytes", c_int64),
        ("section_offset", c_int64),
        ("layer_bytes", c_int64),
        ("head_bytes", c_int64),
        ("scales_offset", c_int64),
        ("token_bytes", c_int32),
        ("block_size", c_int32),
        ("format", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("unused", c_int32),
        ("attend", c_void_p),
    )


class Batch(Structure):
    """Rows of a batch."""

    _fields_ = (
        ("cu_seqlens_q", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_rows", c_int32),
        ("num_tokens", c_int32),
        ("max_blocks", c_int32),
        ("unused", c_int32),
    )


class Ragged(Structure):
    """The rows of a forward pass of a decoder."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("lens", c_void_p),
        ("ends", c_void_p),
        ("tables", c_void_p),
        ("table_lens", c_void_p),
        ("num_rows", c_int32),
        ("unused", c_int32),
        ("origins", c_void_p),
    )


class NativeWanted(Structure):
    """The tokens whose logits a forward pass computes, and the memory for these logits."""

    _fields_ = (
        ("keep", c_void_p),
        ("logits", c_void_p),
        ("num_keep", c_int32),
        ("unused", c_int32),
    )


class Changes(Structure):
    """Changes to the logits from which a token is chosen."""

    _fields_ = (
        ("history", c_void_p),
        ("drafted", c_void_p),
        ("banned", c_void_p),
        ("biased", c_void_p),
        ("biases", c_void_p),
        ("mask", c_void_p),
        ("num_history", c_int32),
        ("num_drafted", c_int32),
        ("num_banned", c_int32),
        ("num_biased", c_int32),
        ("num_words", c_int32),
        ("prompt_len", c_int32),
        ("repetition", c_float),
        ("frequency", c_float),
        ("presence", c_float),
        ("unused", c_int32),
    )


class Proposals(Structure):
    """For each row: the number of tokens to propose, the way to choose them, and the memory for
    them.
    """

    _fields_ = (
        ("counts", c_void_p),
        ("draws", c_void_p),
        ("token_ids", c_void_p),
        ("num_rows", c_int32),
        ("unused", c_int32),
    )


class Choices(Structure):
    """For each row: the number of tokens to choose after the proposed ones, the way to choose them,
    and the memory for them.
    """

    _fields_ = (
        ("counts", c_void_p),
        ("scored", c_void_p),
        ("draws", c_void_p),
        ("proposed", c_void_p),
        ("token_ids", c_void_p),
        ("forward_s", c_double),
    )


class NativeDrafting(Structure):
    """The rows for which a draft model proposes tokens before verification, with the number of
    tokens for each row.
    """

    _fields_ = (
        ("rows", c_void_p),
        ("counts", c_void_p),
        ("logits", c_void_p),
        ("num_rows", c_int32),
        ("unused", c_int32),
        ("seconds", c_double),
    )


def instructions(library: Native) -> str:
    """Returns the processor instructions in use that affect the bits of products."""
    if library.baton_uses_amx():
        return "amx"
    return "avx512" if library.baton_is_avx512() else "avx2"
