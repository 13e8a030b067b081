"""Synthetic prompts, generated from a seed. Pure, except that `plain_token_ids` reads one file.

Prompts of token ids have an exact length. Prompts of text have one common word per token, so their
length is approximate; the server's usage gives the exact one. The prompts of one call start with
different symbols, as long as the vocabulary has enough. So no prompt hits another prompt's blocks
in a prefix cache. With a shared prefix, all prompts start with that prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from engine.errors import ConfigError

Prompt = str | list[int]
Messages = list[dict[str, str]]  # messages of the chat endpoint, with role and content
T = TypeVar("T")

_WORD_TEXT = """
able acid aged also area army away baby back ball band bank base bath bear beat been beer bell
belt best bill bird blow blue boat body bomb bond bone book born boss both bowl bulk burn bush
busy call calm came camp card care case cash cast cell chat chip city club coal coat code cold
come cook cool cope copy core cost crew crop dark data date dawn days dead deal dean dear debt
deep desk dial diet disc disk does done door dose down draw drew drop drug dual duke dust duty
each earn ease east easy edge else even ever exit face fact fail fair fall farm fast fate fear
feed feel feet fell felt file fill film find fine fire firm fish five flat flow food foot ford
form fort four free from fuel full fund gain game gate gave gear gift girl give glad goal goes
gold golf gone good gray grew grid grow gulf hair half hall hand hang hard harm hate have head
hear heat held help here hero high hill hire hold hole holy home hope host hour huge hunt hurt
idea inch into iron item join jump jury just keen keep kept kick kind king knee knew know lack
lady laid lake land lane last late lead left less life lift like line link list live load loan
lock long look lord lose loss lost love luck made mail main make many mark mass meal mean meat
meet menu mere mile milk mill mind mine miss mode mood moon more most move much must name navy
near neck need news next nice nine none nose note okay once only onto open oral over pace pack
page paid pain pair palm park part pass past path peak pick pink pipe plan play plot plus poll
pool poor port post pull pure push race rail rain rank rare rate read real rear rely rent rest
rice rich ride ring rise risk road rock role roll roof room root rose rule rush safe said sake
sale salt same sand save seat seed seek seem seen self sell send sent ship shop shot show shut
sick side sign site size skin slip slow snow soft soil sold sole some song soon sort soul spot
star stay step stop such suit sure take tale talk tall tank tape task team tech tell tend term
test text than that them then they thin this thus till time tiny told toll tone tool tour town
tree trip true tune turn twin type unit upon used user vary vast very vote wage wait wake walk
wall want ward warm wash wave ways weak wear week well went were west what when whom wide wife
wild will wind wine wing wire wise wish with wood word wore work yard yeah year your zero zone
"""
WORDS = tuple(_WORD_TEXT.split())


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Number and length of prompts. `input_len` includes the shared prefix."""

    num_prompts: int
    input_len: int
    shared_prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_len < self.input_len:
            raise ValueError(
                f"a prompt of {self.input_len} tokens has no room for"
                f" {self.shared_prefix_len} shared ones and one of its own"
            )


def token_prompts(vocab: Sequence[int], shape: PromptShape, rng: Random) -> list[Prompt]:
    """Returns prompts of exactly `input_len` ids drawn from `vocab`."""
    return [*_draw(vocab, shape, rng)]


def text_prompts(shape: PromptShape, rng: Random) -> list[Prompt]:
    """Returns prompts of `input_len` words."""
    return [" ".join(words) for words in _draw(WORDS, shape, rng)]


def plain_token_ids(tokenizer_dir: Path) -> list[int]:
    """Returns the ids in `tokenizer.json` that represent text. Special and other added tokens are
    left out.

    Raises ConfigError if the folder has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"there is no {path}")
    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder().keys()
    return sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - set(added))


def _draw(vocab: Sequence[T], shape: PromptShape, rng: Random) -> list[list[T]]:
    prefix = rng.choices(vocab, k=shape.shared_prefix_len)
    num_rest = shape.input_len - shape.shared_prefix_len - 1
    firsts = _distinct_while_possible(vocab, shape.num_prompts, rng)
    return [[*prefix, first, *rng.choices(vocab, k=num_rest)] for first in firsts]


def _distinct_while_possible(vocab: Sequence[T], count: int, rng: Random) -> list[T]:
    shuffled = rng.sample(vocab, k=len(vocab))
    return [shuffled[i % len(shuffled)] for i in range(count)]
