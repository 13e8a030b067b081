"""Loads the C++ library and declares its functions.

Structures have the same fields as in C++. Each structure is defined in the module that fills it.
"""

import ctypes
from ctypes import c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from types import SimpleNamespace

from engine.layout import KVFormat
from engine.native.build import FORMATS, UNITS, Unit, built_library

NONE = -1  # means a missing number
_TYPES = {"i": c_int32, "q": c_int64, "Q": c_uint64, "d": c_double, "p": c_void_p, "-": None}

# The type of the result, then the types of the arguments. These functions take microseconds, so
# they do not release the interpreter's lock.
_HOLDING = {
    "baton_index_open": "pQ",
    "baton_index_close": "-p",
    "baton_index_add": "ip",
    "baton_index_forget": "-pi",
    "baton_index_clear": "-pi",
    "baton_index_store": "-pipq",
    "baton_index_remove": "-pipq",
    "baton_index_num_held": "qpi",
    "baton_index_num_blocks": "qp",
    "baton_index_num_bytes": "qp",
    "baton_index_is_sound": "ip",
    "baton_index_longest": "qppqp",
    "baton_fleet_open": "ppqQp",
    "baton_fleet_close": "-p",
    "baton_fleet_costs": "-pip",
    "baton_fleet_kind": "ipp",
    "baton_fleet_join": "-pii",
    "baton_fleet_leave": "-pi",
    "baton_fleet_loads": "-ppq",
    "baton_fleet_put_store": "-pp",
    "baton_fleet_drop_store": "-pi",
    "baton_fleet_decide": "-pp",
    "baton_fleet_is_sound": "ip",
    "baton_vocabulary_open": "ppppq",
    "baton_vocabulary_close": "-p",
    "baton_text_open": "p",
    "baton_text_close": "-p",
    "baton_text_step": "qppppqpppp",
    "baton_text_frame": "ippqdp",
    "baton_text_stream_open": "ippqpiq",
    "baton_text_stream_close": "-ppq",
    "baton_ngrams_open": "p",
    "baton_ngrams_close": "-p",
    "baton_ngrams_look": "-pipppp",
}
# These functions release the interpreter's lock, because they take longer.
_RELEASING = {
    "baton_copy_records": "ippqpq",
    "baton_gather_records": "ippqpqp",
    "baton_scatter_records": "ippqpqp",
    "baton_convert_records": "-pqqiipp",
    "baton_wide_cipher": "ip",
    "baton_stream_open": "pippi",
    "baton_stream_close": "-p",
    "baton_stream_note": "ippq",
    "baton_stream_send": "ippqqi",
    "baton_stream_receive": "ippqqip",
    "baton_set_word": "-pQ",
    "baton_word_is": "ipQi",
    "baton_disk_header_checksums": "-pqp",
    "baton_disk_open": "ipp",
    "baton_disk_submit": "-ppq",
    "baton_disk_reap": "qppq",
    "baton_disk_cancel": "-pQ",
    "baton_disk_close": "ipd",
    "baton_panel": "i",
    "baton_is_avx512": "i",
    "baton_use_amx": "ii",
    "baton_uses_amx": "i",
    "baton_team_open": "pi",
    "baton_team_close": "-p",
    "baton_packed_bytes": "qiii",
    "baton_padded_cols": "iii",
    "baton_pack": "-ipiippp",
    "baton_linear_scratch": "qppi",
    "baton_linear": "-pppipp",
    "baton_attend": "-pppipipppp",
    "baton_decoder_open": "pppp",
    "baton_decoder_close": "-p",
    "baton_decoder_forward": "-ppp",
    "baton_decoder_draft": "ipppp",
    "baton_decoder_verify": "ipppp",
    "baton_decoder_speculate": "ippppppp",
    "baton_sample": "ippiipp",
    "peaks_fp32": "diq",
    "peaks_int8": "diq",
    "peaks_int8_tiles": "diq",
    "peaks_bf16_tiles": "diq",
    "peaks_read": "dipqq",
}


class Native(SimpleNamespace):
    """The functions of the library by name, and the address of the attention function for each KV
    format.
    """

    attention: dict[KVFormat, int]


@cache
def library(units: tuple[Unit, ...] = UNITS) -> Native:
    """Returns the library for this machine; builds the library if necessary. Raises BuildError."""
    path = str(built_library(units))
    found = Native()
    for kind, signatures in ((ctypes.PyDLL, _HOLDING), (ctypes.CDLL, _RELEASING)):
        loaded = kind(path)
        for name, types in signatures.items():
            if units is not UNITS and not hasattr(loaded, name):
                continue
            function = getattr(loaded, name)
            function.restype = _TYPES[types[0]]
            function.argtypes = [_TYPES[each] for each in types[1:]]
            setattr(found, name, function)
    found.attention = {
        kv_format: ctypes.cast(getattr(loaded, f"baton_attention_{number}"), c_void_p).value or 0
        for kv_format, number in FORMATS.items()
    }
    return found
