"""The ranks of a worker that spans several devices. Integers only.

    tp    tensor parallel: the ranks of a stage hold slices of each of its layers
    pp    pipeline parallel: stages hold consecutive layers
    ep    experts: 1, or tp. Then the ranks of a stage hold whole experts, not slices of all

Rank 0 plans the steps, chooses tokens and communicates with the router. So it is in the last stage,
which computes the logits:

    rank    0 … tp - 1       tp … 2 tp - 1    …    (pp - 1) tp … pp tp - 1
    stage   pp - 1           pp - 2                0

All ranks use the same block ids. A rank's blocks contain the layers of its stage, and of each layer
this rank's share of the KV heads. With fewer KV heads than ranks, neighbouring ranks have the same
head.
"""

import re

import msgspec

from engine.errors import ConfigError
from engine.layout import MAX_RANKS, KVLayout, KVSection, LayerRange, Shard

_SPLIT = re.compile(r"tp\d+ pp\d+ ep\d+$")  # the form of `RankPlace.name`


class RankPlace(msgspec.Struct, frozen=True):
    """The place of one rank among its worker's ranks."""

    rank: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep) < 1 or self.size > MAX_RANKS:
            raise ConfigError(f"a worker has 1 to {MAX_RANKS} ranks, not {self.tp} x {self.pp}")
        if self.ep not in (1, self.tp):
            raise ConfigError(f"ep is {self.ep}: experts are spread over 1 or all {self.tp} ranks")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}")

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.tp * self.pp

    @property
    def name(self) -> str:
        """Returns a text that describes how the worker is split. The order of sums, and so their
        last bits, depend on the split.
        """
        return f"tp{self.tp} pp{self.pp} ep{self.ep}"

    @property
    def slice(self) -> int:
        """Returns the number of this rank's slice among the `tp` slices."""
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        """Returns the number of this rank's stage among the `pp` stages."""
        return self.pp - 1 - self.rank // self.tp

    @property
    def is_first_stage(self) -> bool:
        """True if this rank computes hidden states from tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes logits."""
        return self.stage == self.pp - 1

    def ranks_of(self, stage: int) -> range:
        """Returns the ranks of a stage, in the order of their slices."""
        first = (self.pp - 1 - stage) * self.tp
        return range(first, first + self.tp)

    def layers(self, num_layers: int) -> range:
        """Returns the layers of this rank's stage. If the layers cannot be divided evenly, the last
        stages have fewer layers.
        """
        if num_layers < self.pp:
            raise ConfigError(f"{num_layers} layers cannot be split into {self.pp} stages")
        each, more = divmod(num_layers, self.pp)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))

    def share(self, total: int) -> range:
        """Returns this rank's slice of `total` rows. The last slices may be shorter, or empty."""
        each = -(-total // self.tp)
        first = min(self.slice * each, total)
        return range(first, min(first + each, total))

    def kv_heads(self, total: int) -> range:
        """Returns this rank's share of `total` KV heads: an equal share, or one head that several
        ranks have.

        Raises ConfigError if the heads cannot be divided in either way.
        """
        if total % self.tp and self.tp % total:
            raise ConfigError(f"{total} KV heads cannot be shared by {self.tp} ranks")
        return Shard(self.slice, self.tp).heads_of(KVSection(1, total, 1))

    def shard(self, whole: KVLayout, *, shares_heads: bool) -> Shard:
        """Returns the share of each block that this rank has. Without `shares_heads`, all ranks of
        a stage have all heads.
        """
        layers: tuple[LayerRange, ...] = ()
        if self.pp > 1:
            ranges = (self.layers(section.num_layers) for section in whole.sections)
            layers = tuple(LayerRange(own.start, len(own)) for own in ranges)
        return Shard(self.slice, self.tp, layers) if shares_heads else Shard(layers=layers)


def shards_of(place: RankPlace, whole: KVLayout, own: KVLayout) -> tuple[Shard, ...]:
    """Returns each rank's share of each block. Computes it from the layout of all ranks together
    and the layout of the rank at `place`.

    Raises ConfigError if the models of one worker divide their heads in different ways.
    """
    for shares_heads in (True, False):
        if whole.of_rank(place.shard(whole, shares_heads=shares_heads)) == own:
            ranks = (msgspec.structs.replace(place, rank=rank) for rank in range(place.size))
            return tuple(rank.shard(whole, shares_heads=shares_heads) for rank in ranks)
    raise ConfigError("the model and its draft share their KV heads in different ways")


def split_of(kernels: str) -> str:
    """Returns the text in a worker's `kernels` that describes its split; an empty text if the
    worker has one rank.
    """
    found = _SPLIT.search(kernels)
    return "" if found is None else found[0]
