"""PrefixIndex against a slow twin that has a set of hashes for each worker."""

from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.messages import WorkerId
from engine.worker.blocks import hash_blocks
from router.native.index import PrefixIndex

CHAINS = [hash_blocks([first, *range(24)], 1) for first in range(4)]
NAMES = [WorkerId(f"w{i}") for i in range(80)]  # more workers than one machine word has bits

prefixes = st.tuples(st.sampled_from(CHAINS), st.integers(0, 24)).map(lambda p: p[0][: p[1]])
slices = st.tuples(st.sampled_from(CHAINS), st.integers(0, 24), st.integers(0, 24)).map(
    lambda p: p[0][min(p[1:]) : max(p[1:])]
)
some_names = st.sampled_from(NAMES)


class IndexAndItsTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(seed=7)
        self.twin = {}

    @initialize(count=st.sampled_from([1, 3, 7, 80]))
    def begin(self, count):
        for name in NAMES[:count]:
            self.add(name)

    @rule(name=some_names)
    def add(self, name):
        self.index.add(name, 100)
        self.twin[name] = set()

    @rule(name=some_names)
    def remove(self, name):
        self.index.remove(name)
        self.twin.pop(name, None)

    @rule(name=some_names, hashes=slices)
    def stored(self, name, hashes):
        self.index.stored(name, hashes)
        if name in self.twin:
            self.twin[name].update(hashes)

    @rule(hashes=slices, keep=st.integers(1, 5))
    def stored_by_many(self, hashes, keep):
        for name in NAMES[::keep]:
            self.stored(name, hashes)

    @rule(name=some_names, hashes=slices)
    def removed(self, name, hashes):
        self.index.removed(name, hashes)
        if name in self.twin:
            self.twin[name].difference_update(hashes)

    @rule(hashes=slices, keep=st.integers(1, 5))
    def removed_by_many(self, hashes, keep):
        for name in NAMES[::keep]:
            self.removed(name, hashes)

    @rule(name=some_names)
    def cleared(self, name):
        self.index.cleared(name)
        if name in self.twin:
            self.twin[name].clear()

    @rule(hashes=prefixes)
    def longest(self, hashes):
        counts = {
            name: sum(1 for _ in takewhile(held.__contains__, hashes))
            for name, held in self.twin.items()
        }
        assert self.index.longest(hashes) == {name: n for name, n in counts.items() if n}

    @rule()
    def validate(self):
        self.index.validate()
        assert self.index.num_blocks == len(set().union(*self.twin.values()))

    @invariant()
    def the_same_workers_hold_as_many_blocks(self):
        assert self.index.workers == self.twin.keys()
        for name, held in self.twin.items():
            assert self.index.num_held(name) == len(held)

    def teardown(self):
        for chain in CHAINS:
            self.longest(chain)
        self.validate()


TestIndexAndItsTwin = IndexAndItsTwin.TestCase
TestIndexAndItsTwin.settings = settings(max_examples=40, stateful_step_count=40)
