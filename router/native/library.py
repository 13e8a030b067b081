"""The C++ functions in Python: structures, signatures, and the loaded library.

Structures mirror those of the same names in src/fleet.h, field by field.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from engine.native_build import Sources, built_library, open_library

SOURCES = Sources("router", Path(__file__).parent / "src", "router.cpp")

NONE = -1  # in place of a slot
NUM_MEDIA = 3  # of a store: memory and what is in `router.cluster.media`


class FleetCosts(Structure):
    """Costs of workers of one class."""

    _fields_ = (
        ("prefill", c_double),
        ("prefill_per_token", c_double),
        ("prefill_per_square", c_double),
        ("decode", c_double),
        ("decode_per_seq", c_double),
        ("decode_per_token", c_double),
        ("pull", c_double),
        ("pull_per_block", c_double),
    )


class FleetKind(Structure):
    """Properties that workers of one kind share."""

    _fields_ = (
        ("costs", c_int32),
        ("group", c_int32),
        ("prefills", c_int32),
        ("decodes", c_int32),
        ("pulls", c_int32),
        ("is_fluid", c_int32),
        ("num_blocks", c_int64),
        ("max_running", c_int64),
        ("stretch", c_double),
    )


class FleetStore(Structure):
    """A store: its slots in the index, and the seconds that it takes to read each medium."""

    _fields_ = (
        ("group", c_int32),
        ("slots", c_int32 * NUM_MEDIA),
        ("load", c_double * NUM_MEDIA),
        ("load_per_block", c_double * NUM_MEDIA),
    )


Core = ctypes.PyDLL

_HASHES = (c_char_p, c_int64)
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "baton_index_open": (c_void_p, (c_uint64,)),
    "baton_index_close": (None, (c_void_p,)),
    "baton_index_add": (c_int32, (c_void_p,)),
    "baton_index_forget": (None, (c_void_p, c_int32)),
    "baton_index_clear": (None, (c_void_p, c_int32)),
    "baton_index_store": (None, (c_void_p, c_int32, *_HASHES)),
    "baton_index_remove": (None, (c_void_p, c_int32, *_HASHES)),
    "baton_index_num_held": (c_int64, (c_void_p, c_int32)),
    "baton_index_num_blocks": (c_int64, (c_void_p,)),
    "baton_index_num_bytes": (c_int64, (c_void_p,)),
    "baton_index_is_sound": (c_int32, (c_void_p,)),
    "baton_index_longest": (c_int64, (c_void_p, *_HASHES, c_void_p)),
    "baton_fleet_open": (c_void_p, (c_void_p, c_int64, c_uint64, c_double, c_double, c_double)),
    "baton_fleet_close": (None, (c_void_p,)),
    "baton_fleet_costs": (None, (c_void_p, c_int32, POINTER(FleetCosts))),
    "baton_fleet_kind": (c_int32, (c_void_p, POINTER(FleetKind))),
    "baton_fleet_join": (None, (c_void_p, c_int32, c_int32)),
    "baton_fleet_leave": (None, (c_void_p, c_int32)),
    "baton_fleet_loads": (None, (c_void_p, c_void_p, c_int64)),
    "baton_fleet_put_store": (None, (c_void_p, POINTER(FleetStore))),
    "baton_fleet_drop_store": (None, (c_void_p, c_int32)),
    "baton_fleet_decide": (None, (c_void_p, c_char_p)),
    "baton_fleet_is_sound": (c_int32, (c_void_p,)),
}


@cache
def opened() -> Core:
    """The library for this machine, built if need be. Raises BuildError."""
    return open_library(built_library(SOURCES), SIGNATURES, Core)


def address_of(buffer: bytearray) -> int:
    """Returns the address of a buffer's bytes. The caller keeps the buffer, at its length."""
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
