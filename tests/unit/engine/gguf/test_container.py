"""Headers of GGUF files: the values that are read, and false headers refused by name."""

import random
import struct

import pytest

from engine.errors import CheckpointError
from engine.gguf.container import BLOCKS, MAX_ARRAY_LEN, TensorPlace, read_gguf
from tests.kits.models.gguf import Contents, tiny

START = 24  # bytes of the magic number, the version and the counts


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message) < len(str(path)) + 300
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("version", [2, 3])
def test_key_values_and_places_of_tensors_are_read(version, tmp_path):
    values = {
        "a": "text ü",
        "b": True,
        "c": 7,
        "d": 0.5,
        "e": [1, 2, 3],
        "f": ["x", ""],
        "g": [1.5],
    }
    tensors = {"one": ("F32", (2, 3), bytes(24)), "two": ("Q4_1", (2, 64), bytes(80))}
    header = read_gguf(Contents(values, tensors, version).write(tmp_path / "a.gguf"))
    assert header.values == values
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.type_name, one.shape, one.num_bytes) == ("F32", (2, 3), 24)
    assert two == TensorPlace("Q4_1", (2, 64), one.begin + 32, 80)
    assert (tmp_path / "a.gguf").stat().st_size == two.begin + 96


def test_the_alignment_of_a_file_is_kept(tmp_path):
    path = Contents({"general.alignment": 64}, {"t": ("F32", (1,), bytes(4))}).write(tmp_path / "a")
    path.write_bytes(path.read_bytes() + bytes(64))
    assert read_gguf(path).tensors["t"].begin % 64 == 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "corrupted: not a GGUF file"),
        (b"GGU", "corrupted: not a GGUF file"),
        (b"PK\3\4" + bytes(40), "corrupted: not a GGUF file"),
        (b"GGUF" + bytes(3), "corrupted: it ends within 'its version'"),
        (
            b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
            "GGUF version 1 is not read, only versions 2 and 3",
        ),
        (
            b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
            "a big-endian file is not read, only versions 2 and 3",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1),
            "corrupted: it claims 9223372036854775808 tensors and 1 key/values",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "corrupted: it ends within 'a key'"),
    ],
)
def test_bytes_of_another_format_are_refused(data, why, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    assert refusal(path) == why


def with_value(tmp_path, encoded):
    """Returns a file whose only value has these bytes."""
    path = tmp_path / "a.gguf"
    path.write_bytes(Contents({"k": True}).encoded()[: START + 9] + encoded)
    return path


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (struct.pack("<IQ", 8, 2**62), "corrupted: it ends within 'k'"),
        (struct.pack("<I", 13), "corrupted: 'k' has a value of unknown type 13"),
        (struct.pack("<IIQ", 9, 4, 2**61), f"corrupted: 'k' claims {2**61} values"),
        (struct.pack("<IIQ", 9, 8, 10**6), "corrupted: 'k' claims 1000000 values"),
        (
            struct.pack("<IIQ", 9, 7, MAX_ARRAY_LEN + 1),
            f"corrupted: 'k' claims {MAX_ARRAY_LEN + 1} values",
        ),
        (struct.pack("<IIQ", 9, 9, 1), "'k' holds arrays of arrays"),
        (struct.pack("<IIQ", 9, 77, 1) + bytes(8), "corrupted: 'k' has a value of unknown type 77"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xff", "corrupted: 'k' is not UTF-8"),
    ],
)
def test_a_corrupted_value_is_refused(encoded, why, tmp_path):
    assert refusal(with_value(tmp_path, encoded)) == why


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (Contents({}, {"t": ("Q6_K", (256,), bytes(210))}), "t has type Q6_K; read are F32, F16,"),
        (Contents({}, {"t": ("?", (2,), bytes(8))}), "t has type number 99; read are F32"),
        (Contents({}, {"t": ("F32", (2, 2**40), b"")}), "corrupted: 't' ends at byte"),
        (Contents({}, {"t": ("F32", (0, 3), b"")}), "corrupted: 't' has shape [0, 3]"),
        (Contents({}, {"t": ("Q8_0", (2, 33), bytes(99))}), "corrupted: 't' has shape [2, 33]"),
        (Contents({}, {"t": ("F32", (1,) * 5, bytes(4))}), "corrupted: 't' has 5 dimensions"),
        (Contents({"general.alignment": 0}), "corrupted: general.alignment is 0"),
        (Contents({"general.alignment": 24}), "corrupted: general.alignment is 24, no power"),
        (Contents({"general.alignment": "8"}), "corrupted: general.alignment is '8'"),
        (Contents({"split.count": 3}), "is split into several files; merge them first"),
    ],
)
def test_an_unsupported_or_corrupted_tensor_is_refused(contents, why, tmp_path):
    assert refusal(contents.write(tmp_path / "a.gguf")).startswith(why)


def test_names_that_occur_twice_are_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(Contents({"aa": 1, "ab": 1}).encoded().replace(b"ab", b"aa"))
    assert refusal(path) == "corrupted: the key 'aa' occurs twice"
    tensors = {name: ("F32", (1,), bytes(4)) for name in ("ta", "tb")}
    path.write_bytes(Contents({}, tensors).encoded().replace(b"tb", b"ta"))
    assert refusal(path) == "corrupted: the tensor 'ta' occurs twice"


def test_a_long_name_makes_no_long_message(tmp_path):
    path = Contents({}, {"t" * 10_000: ("Q6_K", (256,), bytes(210))}).write(tmp_path / "a.gguf")
    assert refusal(path)


def test_every_cut_of_a_file_is_refused(tmp_path):
    whole = Contents({"a": "b", "c": [1, 2]}, {"t": ("F32", (3,), bytes(12))}).encoded()
    path, needed = tmp_path / "a.gguf", len(whole) - 20
    for length in range(needed):
        path.write_bytes(whole[:length])
        assert refusal(path)


def test_any_changed_bytes_are_read_or_refused_by_name(tmp_path):
    rng, path = random.Random(7), tmp_path / "a.gguf"
    whole = Contents({"a": "b", "c": ["x", "y"]}, {"t": ("Q4_0", (2, 32), bytes(36))}).encoded()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(data)
        try:
            header = read_gguf(path)
        except CheckpointError:
            continue
        for place in header.tensors.values():
            assert place.begin + place.num_bytes <= len(data)


def test_blocks_have_the_sizes_of_their_parts():
    assert BLOCKS["Q4_0"] == (32, 2 + 16)
    assert BLOCKS["Q4_1"] == (32, 2 + 2 + 16)
    assert BLOCKS["Q8_0"] == (32, 2 + 32)


def test_a_tiny_model_is_read(tmp_path):
    header = read_gguf(tiny().write(tmp_path / "a.gguf"))
    assert header.values["general.architecture"] == "llama"
    assert len(header.tensors) == 3 + 2 * 9
