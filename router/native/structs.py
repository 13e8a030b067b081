"""Structures of `src/router/fleet.h`, with the same fields."""

import ctypes
from ctypes import Structure, c_double, c_int32, c_int64

NUM_MEDIA = 3  # number of media of a store: memory, and the lower media in `router.native.index`


class FleetCosts(Structure):
    """The costs of the workers of one class."""

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
    """A store: its slots in the index, and the seconds that reading each medium takes."""

    _fields_ = (
        ("group", c_int32),
        ("slots", c_int32 * NUM_MEDIA),
        ("load", c_double * NUM_MEDIA),
        ("load_per_block", c_double * NUM_MEDIA),
    )


def address_of(buffer: bytearray) -> int:
    """Returns the address of a buffer's bytes. The caller must keep the buffer and its length."""
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
