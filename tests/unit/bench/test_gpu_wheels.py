"""The packages collected for a machine without network access."""

from pathlib import Path

from bench.gpu.wheels import command_of, needed

NEEDS = {"a": ["b", "c"], "b": ["torch", "d"], "c": ["a"], "d": [], "torch": ["cuda"]}
KNOWN = dict.fromkeys(("a", "b", "c", "d", "torch", "cuda"), "1.0")


def test_all_that_is_lacking_is_collected():
    def needs(name):
        return NEEDS[name]

    assert needed(["a"], needs, have=("torch",), known=KNOWN) == ["a", "b", "c", "d"]
    assert needed(["a"], needs, have=("torch", "B"), known=KNOWN) == ["a", "c"]
    of_another_system = {name: "1" for name in KNOWN if name != "d"}
    assert needed(["a"], needs, have=("torch",), known=of_another_system) == ["a", "b", "c"]


def test_wheels_are_for_the_other_python():
    words = command_of(["a==1"], Path("/w"), "3.12")
    assert words[words.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_x86_64" in words
    assert words[-1] == "a==1"
