"""Lease words between two processes: what an unchanged word proves, and the harm of hostile
offers.
"""

import subprocess
import sys
from contextlib import closing, contextmanager

import msgspec
import pytest

from kvtransfer.lease_words import LeaseWords, NoWords, SourcesWords
from kvtransfer.messages import NUM_WORDS, LeaseWord, ShmOffer

OWNER = """
import sys, msgspec
from kvtransfer.lease_words import LeaseWords
words = LeaseWords()
words.open()
print(msgspec.json.encode(words.offer()).decode(), flush=True)
for line in sys.stdin:
    place, generation = map(int, line.split())
    words.set(place, generation)
    print("set", flush=True)
"""


class Owner:
    """The process of a source."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.offer = msgspec.json.decode(self.process.stdout.readline(), type=ShmOffer)

    def set(self, place, generation):
        self.process.stdin.write(f"{place} {generation}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "set\n"

    def kill(self):
        self.process.kill()
        self.process.communicate()


@contextmanager
def own_words():
    words = LeaseWords()
    words.open()
    with closing(words):
        yield words


@contextmanager
def mapped(offer):
    words = SourcesWords()
    words.open(offer)
    with closing(words):
        yield words


@pytest.fixture(scope="module")
def owner():
    owner = Owner()
    yield owner
    owner.kill()


def test_a_word_proves_its_own_generation_only_until_it_changes(owner):
    with mapped(owner.offer) as words:
        assert not words.prove(LeaseWord(3, 7))
        owner.set(3, 7)
        assert words.prove(LeaseWord(3, 7))
        assert not words.prove(LeaseWord(3, 6))
        assert not words.prove(LeaseWord(4, 7))
        owner.set(3, 0)
        assert not words.prove(LeaseWord(3, 7))


@pytest.mark.parametrize("place", [-1, NUM_WORDS, 2**40])
def test_a_place_outside_the_words_proves_nothing(owner, place):
    with mapped(owner.offer) as words:
        assert not words.prove(LeaseWord(place, 7))


def test_words_of_a_killed_process_prove_nothing():
    owner = Owner()
    owner.set(0, 5)
    with mapped(owner.offer) as words:
        assert words.prove(LeaseWord(0, 5))
        owner.kill()
        assert not words.prove(LeaseWord(0, 5))


def test_words_that_their_source_has_closed_prove_nothing():
    with own_words() as own, mapped(own.offer()) as words:
        own.set(0, 5)
        assert words.prove(LeaseWord(0, 5))
        own.close()
        assert not words.prove(LeaseWord(0, 5))
        own.open()  # opened again, because the test closes it at the end


def test_offers_of_other_memory_or_dead_processes_are_refused(owner):
    offer = owner.offer
    wrong = [
        msgspec.structs.replace(offer, num_bytes=64),
        msgspec.structs.replace(offer, inode=offer.inode + 1),
        msgspec.structs.replace(offer, fd=0),
        msgspec.structs.replace(offer, pid=2**22 + 1),
        msgspec.structs.replace(offer, pid=-1),
        msgspec.structs.replace(offer, pid=2**40),
        msgspec.structs.replace(offer, boot_id="another host"),
    ]
    for one in wrong:
        with pytest.raises(NoWords):
            SourcesWords().open(one)
