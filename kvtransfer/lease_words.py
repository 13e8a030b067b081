"""Lease words in shared memory: a sink reads a word after a copy, instead of asking the source.

While a lease is open, its word is a generation. The source sets the word to zero before it frees
any block of the lease, and a generation is never used again. So a word that is unchanged after a
copy proves that the lease was open until the end of the copy. The sink need not read the word
before the copy.

    source   word = 0, fence, the lease's end is reported, its blocks are reused
    sink     copy, fence, read the word

The source's process must also be alive after the copy. Mapped host memory outlives its process, but
a GPU's memory may not. C++ reads and writes the words, since Python has no fences:
`src/transfer/words.h`.

A hostile source can set its words to any value. The source gains nothing by that, since it could
also send wrong bytes. Sinks map the words read-only, and the memory cannot shrink while it is
mapped.
"""

import os

from engine.errors import BatonError
from engine.native.library import library
from kvtransfer.memory import SharedMemory, ShmUnavailable, address_of, map_offer, shm_offer
from kvtransfer.messages import NUM_WORDS, LeaseWord, ShmOffer

WORD_BYTES = 8


class NoWords(BatonError):
    """Lease words cannot be used; the message says why."""


class LeaseWords:
    """The words of a source's own leases."""

    def open(self) -> None:
        """Allocates the memory; all words are zero. Raises NoWords."""
        try:
            self._memory = SharedMemory.in_small_pages(NUM_WORDS * WORD_BYTES)
        except OSError as error:
            raise NoWords(f"no shared memory: {error.strerror}") from error
        self._address = address_of(self._memory.mapped)
        self._set = library().baton_set_word

    def offer(self) -> ShmOffer:
        """Returns the data that a sink needs to map the words."""
        return shm_offer(self._memory)

    def set(self, place: int, generation: int) -> None:
        """Sets a word before any later write of this process becomes visible to readers."""
        assert 0 <= place < NUM_WORDS
        self._set(self._address + WORD_BYTES * place, generation)

    def close(self) -> None:
        """Closes the memory. A sink that has mapped it reads zeros, or detects the process's
        death.
        """
        self._memory.mapped[:] = bytes(NUM_WORDS * WORD_BYTES)
        self.set(0, 0)  # acts as a memory fence
        self._memory.close()


class SourcesWords:
    """The lease words of a source on this host, mapped into this process."""

    def open(self, offer: ShmOffer) -> None:
        """Maps the words. Raises NoWords."""
        try:
            process = os.pidfd_open(offer.pid)  # opened before the owner of the memory is checked
        except (OSError, OverflowError) as error:
            raise NoWords(f"cannot watch the source's process: {error}") from error
        try:
            self._words = map_offer(offer, NUM_WORDS, WORD_BYTES)
        except ShmUnavailable as error:
            os.close(process)
            raise NoWords(str(error)) from error
        self._process = process
        self._address = self._words.ctypes.data
        self._is = library().baton_word_is

    def prove(self, word: LeaseWord) -> bool:
        """Returns True if the lease was open and its source alive when all earlier copies were
        finished.
        """
        if not 0 <= word.place < NUM_WORDS:
            return False
        address = self._address + WORD_BYTES * word.place
        return bool(self._is(address, word.generation, self._process))

    def close(self) -> None:
        """Unmaps the words."""
        del self._words
        os.close(self._process)
