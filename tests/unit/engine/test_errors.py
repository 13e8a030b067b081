"""An error's type is its fault, its fields are its facts, and one tree contains all errors."""

import builtins
import re

import pytest

import engine.errors
from engine.errors import (
    BatonError,
    CheckpointError,
    ConfigError,
    InvalidRequest,
    LayoutMismatch,
    OutOfBlocks,
    ProtocolError,
)
from tests.kits.tree import house

BUILT_IN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
NO_ERRORS = {
    "StopAsked": "a signal that interrupts the start of a command",
    "NoPositiveForm": "control flow of the rewriting of schemas: a negation that has none",
    "LeaseLost": "control flow of the batches: another process runs them now",
    "StreamLost": "control flow of a sink: its connection to a source is gone",
    "VersionLeaves": "control flow of the batches: a paused request starts again elsewhere",
    "ClientLeft": "control flow of the gateway: the client closed its connection",
}


def exceptions_of_the_source() -> dict[str, str]:
    """Returns each public exception class and its parent; of two parents, Baton's own."""
    classes = [(each.name, each.bases) for each in house.classes_of_the_tree()]
    ours: set[str] = set()
    while found := {
        name
        for name, bases in classes
        if name not in ours and not (BUILT_IN | ours).isdisjoint(bases)
    }:
        ours |= found
    return {
        name: next((base for base in bases if base in ours), bases[0])
        for name, bases in classes
        if name in ours and not name.startswith("_") and not (BUILT_IN | ours).isdisjoint(bases)
    }


def printed_tree() -> dict[str, str]:
    """Returns each class in the tree that `engine.errors` prints, with its parent there."""
    parents: dict[str, str] = {}
    path = ["BatonError"]
    for indent, name in re.findall(r"^([│ ]*)[├└]── (\w+)  ", engine.errors.__doc__, re.MULTILINE):
        depth = len(indent) // 4 + 1
        assert name not in parents, f"{name} is printed twice"
        parents[name] = path[depth - 1]
        path[depth:] = [name]
    return parents


def test_the_printed_tree_holds_every_public_exception_of_the_source():
    found = exceptions_of_the_source()
    assert found.pop("BatonError") == "Exception"
    for name in NO_ERRORS:
        assert found.pop(name) in ("Exception", "BaseException")
    assert printed_tree() == found


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
def test_every_error_is_a_baton_error_with_a_text(error):
    assert isinstance(error, BatonError)
    assert str(error)


def test_an_unusable_checkpoint_is_a_configuration_error():
    assert issubclass(CheckpointError, ConfigError)


def test_an_invalid_request_has_its_field_and_status():
    error = InvalidRequest("too long", param="prompt", status=413)
    assert (error.message, error.param, error.status) == ("too long", "prompt", 413)
    assert (InvalidRequest("no").param, InvalidRequest("no").status) == (None, 400)


def test_a_layout_mismatch_has_the_field_and_both_values():
    error = LayoutMismatch("block_size", 16, 32)
    assert str(error) == "block_size differs: ours 16, theirs 32"
    assert (error.field, error.ours, error.theirs) == ("block_size", 16, 32)


def test_out_of_blocks_has_both_counts():
    assert str(OutOfBlocks(3, 2)) == "wanted 3 blocks, 2 are free"
