"""The command `baton bench schemas`: its options and its table."""

import importlib
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from bench.common.command import (
    JsonOption,
    SeedOption,
    peer_option,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import report_here
from bench.common.options import peers_named
from bench.common.progress import say_on_stderr
from bench.schemas.ours import NAME
from bench.schemas.plan import SchemasPlan, config_of
from bench.schemas.results import reasons, results, warnings
from bench.schemas.run import PEERS, measure
from deploy.base.defaults import BUNDLED_MODEL
from engine.errors import ConfigError

BUNDLED = BUNDLED_MODEL / "tokenizer.json"
QUICK_SCHEMAS = 100
NUM_REASONS = 10
ENDS = ("<|endoftext|>", "<|eot_id|>", "<|im_end|>", "</s>", "<EOT>", "<eos>")


def schemas(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    suite: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of schemas, with tests.")
    ],
    tokenizer: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="tokenizer.json.", show_default="bundled"),
    ] = BUNDLED,
    num_schemas: Annotated[
        int, typer.Option("--schemas", min=0, help="Drawn from the suite; 0: all.")
    ] = 1000,
    deadline_s: Annotated[
        float, typer.Option(min=0.1, help="For one schema and one engine; longer is a failure.")
    ] = 5.0,
    peer: Annotated[list[str], peer_option(*PEERS)] = [],  # noqa: B006 - as typer wants it
    seed: SeedOption = 0,
    quick: Annotated[bool, quick_option(f"At most {QUICK_SCHEMAS} schemas.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure how many JSON schemas are followed, how truly, and at what cost."""
    with printed_errors():
        _require_jsonschema()
        plan = SchemasPlan(
            suite=suite,
            tokenizer=tokenizer,
            eos=_eos_of(tokenizer),
            num_schemas=min(num_schemas or QUICK_SCHEMAS, QUICK_SCHEMAS) if quick else num_schemas,
            deadline_s=deadline_s,
            seed=seed,
        )
        measured = measure(plan, peers_named(peer, PEERS), say_on_stderr())
        versions = {f"{name}_version": v for name, v in measured.versions.items() if v}
        report = report_here(
            "schemas", seed=seed, config=config_of(plan) | versions, results=results(measured)
        )
        title = f"{len(measured.cases):,} schemas of {suite.name}"
        lines = [
            f"refused {count} times: {reason}"
            for reason, count in reasons(measured.of(NAME))[:NUM_REASONS]
        ]
        publish(report, json, title=title, warnings=[*lines, *warnings(measured)])


def _eos_of(tokenizer: Path) -> int:
    """The token that ends a text. Raises ConfigError."""
    loaded = Tokenizer.from_file(str(tokenizer))
    found = (loaded.token_to_id(name) for name in ENDS)
    eos = next((token_id for token_id in found if token_id is not None), None)
    if eos is None:
        raise ConfigError(f"{tokenizer} has none of the tokens {', '.join(ENDS)}")
    return eos


def _require_jsonschema() -> None:
    """Raises ConfigError if the library that validates is missing."""
    try:
        importlib.import_module("jsonschema")
    except ImportError as error:
        message = f"{error.name} is not installed: pip install 'baton-serve[bench]'"
        raise ConfigError(message) from error
