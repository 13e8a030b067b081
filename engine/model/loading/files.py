"""The files of a checkpoint: checks that they are complete, and identifies the model. Needs no
torch.

A checkpoint is a directory in the form in which transformers saves it:

    config.json, tokenizer.json
    model.safetensors, or model.safetensors.index.json and the shards that it names,
    or, if there is no safetensors file, one *.gguf

Two workers may exchange KV only if they serve the same model in the same way. Equal fingerprints
guarantee this, except for the layout of KV, which is compared separately. The fingerprint is a hash
of the config, the tokenizer, the safetensors headers (names, types, shapes) and a few bytes of
every tensor. These bytes distinguish fine-tunes of one model, which are equal in everything else.
For a GGUF file it covers the size, and bytes at even distances. Weights are not read in full.
"""

import json
import struct
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from engine.errors import CheckpointError
from engine.gguf.architecture import weights_of
from engine.gguf.container import read_gguf
from engine.model.loading.settings import check_settings

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
TOKENIZER = "tokenizer.json"
SLOW_TOKENIZERS = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
MAX_HEADER_BYTES = 100 * 2**20  # limit in the safetensors format
SAMPLE_BYTES = 64
GGUF_SAMPLES = 4096
VOLATILE = frozenset({"transformers_version", "_name_or_path"})  # keys that do not change the model


def check_files(path: Path) -> None:
    """Raises CheckpointError, which names the file, if the directory has no complete model."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    check_settings(path, read_json(path, "config.json"))
    _check_tokenizer(path)
    headers = {}
    for file in weight_files(path):
        if file.suffix == ".gguf":
            weights_of(read_gguf(file))
        else:
            headers[file.name] = read_header(file)
    if (path / INDEX).is_file():
        _check_index(path, headers)


def _check_tokenizer(path: Path) -> None:
    """Raises CheckpointError if tokenizer.json is missing or not JSON."""
    slow = [name for name in SLOW_TOKENIZERS if (path / name).is_file()]
    if slow and not (path / TOKENIZER).is_file():
        raise CheckpointError(
            f"{path / TOKENIZER}: missing, and {slow[0]} cannot be used; AutoTokenizer of "
            "transformers writes it, with from_pretrained and save_pretrained"
        )
    read_json(path, TOKENIZER)


def _check_index(path: Path, headers: dict[str, dict[str, dict]]) -> None:
    """Raises CheckpointError if the index assigns a tensor to a shard that lacks this tensor."""
    for tensor, name in _weight_map(path).items():
        if tensor not in headers[name]:
            actual = next((file for file, header in headers.items() if tensor in header), None)
            where = "no shard has it" if actual is None else f"it is in {actual}"
            raise CheckpointError(f"{path / INDEX}: {tensor} is not in {name}: {where}")


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files, sorted by name, or the GGUF file.

    Raises CheckpointError if a file is missing.
    """
    if (path / INDEX).is_file():
        files = [path / name for name in sorted(set(_weight_map(path).values()))]
    else:
        files = sorted(path.glob("*.safetensors")) or _gguf_file(path)
    if not files:
        raise CheckpointError(f"{path}: no *.safetensors or *.gguf file")
    is_alone = files[0].suffix == ".gguf" or (path / INDEX).is_file()
    if not is_alone and not (path / WHOLE).is_file():
        raise CheckpointError(
            f"{path}: has {files[0].name}, but neither {WHOLE} nor {INDEX}, which names shards"
        )
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though {INDEX} names it")
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the shard of each tensor, from the index. Raises CheckpointError.

    A shard must be in the folder itself. It may be a link, as in the caches of model hubs.
    """
    index = read_json(path, INDEX)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{path / INDEX}: weight_map is missing")
    for name in shards.values():
        if not isinstance(name, str) or not _is_own_name(name):
            raise CheckpointError(
                f"{path / INDEX}: names {name!r:.80}, which is no file of this folder"
            )
    return shards


def _is_own_name(name: str) -> bool:
    """True if `name` can only be the name of a file in the folder itself."""
    return name not in ("", "..") and Path(name).name == name and "\0" not in name


def _gguf_file(path: Path) -> list[Path]:
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{path}: {len(files)} *.gguf files: only one is allowed")
    return files


def read_json(path: Path, name: str) -> object:
    """Reads a JSON file of the checkpoint. Raises CheckpointError."""
    try:
        return json.loads((path / name).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path / name}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path / name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / name}: not JSON: {error}") from None


def read_header(file: Path) -> dict[str, dict]:
    """Returns the tensors by name (dtype, shape, data_offsets). Raises CheckpointError for a
    damaged file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{file}: corrupted: not a safetensors file")
        try:
            header = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            data_bytes = max((t["data_offsets"][1] for t in header.values()), default=0)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError):
            raise CheckpointError(f"{file}: corrupted: bad safetensors header") from None
    if size != 8 + header_bytes + data_bytes:
        raise CheckpointError(
            f"{file}: corrupted: {size} bytes, its header says {8 + header_bytes + data_bytes}"
        )
    return header


def fingerprint(path: Path, *, dtype: str, is_stretched: bool = False) -> str:
    """Returns 16 hex digits. They are equal for two workers with equal model, tokenizer, weight
    type and positions.
    """
    digest = blake2b(digest_size=8)
    form = f"{dtype} stretched" if is_stretched else dtype
    for part in chain((form,), _described(path)):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _described(path: Path) -> Iterator[str | bytes]:
    config = read_json(path, "config.json")
    stable = {k: v for k, v in config.items() if k not in VOLATILE}
    yield json.dumps(stable, sort_keys=True)
    yield (path / "tokenizer.json").read_bytes()
    for file in weight_files(path):
        yield from _sampled_gguf(file) if file.suffix == ".gguf" else _sampled(file)


def _sampled(file: Path) -> Iterator[str | bytes]:
    """Returns the header of a safetensors file, and some bytes from the middle of each tensor."""
    header = read_header(file)
    yield json.dumps(header, sort_keys=True)
    with file.open("rb") as stream:
        data_start = 8 + struct.unpack("<Q", stream.read(8))[0]
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            stream.seek(data_start + (begin + end) // 2)
            yield stream.read(min(SAMPLE_BYTES, end - (begin + end) // 2))


def _sampled_gguf(file: Path) -> Iterator[str | bytes]:
    size = file.stat().st_size
    yield str(size)
    with file.open("rb") as stream:
        for i in range(GGUF_SAMPLES):
            stream.seek(i * size // GGUF_SAMPLES)
            yield stream.read(SAMPLE_BYTES)
