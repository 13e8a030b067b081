"""Turns the metadata of a GGUF file into the small files of a transformers checkpoint.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json

The weights stay in the GGUF file (`weights_of`). Equal files give equal bytes, on every machine.
"""

import json

from engine.errors import CheckpointError
from engine.gguf.architecture import config_of
from engine.gguf.container import GgufHeader
from engine.gguf.vocabulary import special_ids, tokenizer_config_of, tokenizer_of


def described(header: GgufHeader) -> dict[str, bytes]:
    """Returns the contents of the files, by name. Raises CheckpointError."""
    config, ids, tokenizer = config_of(header), special_ids(header), tokenizer_of(header)
    if len(tokenizer["model"]["vocab"]) != config["vocab_size"]:
        raise CheckpointError(
            f"{header.path}: lists {len(tokenizer['model']['vocab'])} tokens,"
            f" and embeds {config['vocab_size']}"
        )
    contents = {
        "config.json": config | ids,
        "generation_config.json": ids,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config_of(header),
    }
    return {name: json.dumps(each, ensure_ascii=False).encode() for name, each in contents.items()}
