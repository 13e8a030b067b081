"""The fault is in an error's type, its facts are in its fields."""

import pytest

from engine.errors import (
    BatonError,
    CheckpointError,
    ConfigError,
    InvalidRequest,
    LayoutMismatch,
    OutOfBlocks,
    ProtocolError,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("too long"),
        ConfigError("worker.kv_mib"),
        CheckpointError("config.json"),
        LayoutMismatch("block_size", 16, 32),
        ProtocolError("bad frame"),
        OutOfBlocks(3, 2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_errors_are_batons_and_say_what_happened(error):
    assert isinstance(error, BatonError)
    assert str(error)


def test_an_unusable_checkpoint_is_the_operators_fault():
    assert issubclass(CheckpointError, ConfigError)


def test_an_invalid_request_names_its_field_and_its_status():
    error = InvalidRequest("too long", param="prompt", status=413)
    assert (error.message, error.param, error.status) == ("too long", "prompt", 413)
    assert (InvalidRequest("no").param, InvalidRequest("no").status) == (None, 400)


def test_a_layout_mismatch_names_the_field_and_both_values():
    error = LayoutMismatch("block_size", 16, 32)
    assert str(error) == "block_size differs: ours 16, theirs 32"
    assert (error.field, error.ours, error.theirs) == ("block_size", 16, 32)


def test_out_of_blocks_says_how_many_were_wanted_and_are_there():
    assert str(OutOfBlocks(3, 2)) == "wanted 3 blocks, 2 are free"
