// The word of a lease, in memory that sinks of the same host map: see lease_words.py.
//
// A sequence lock with many readers. While a lease is open, its word is a generation that no other
// lease of the source ever has. The source changes the word before it lets go of any block:
//
//     source   word = 0 | fence | its blocks get other contents
//     sink     blocks are copied | fence | word == generation?
//
// If the copy has seen other contents, the read of the word after it sees the change of the word. So
// a word that still has the generation proves all that was copied before.
#pragma once

#include <poll.h>

#include <cstdint>

namespace baton {

// The fence also orders stores past the caches, on every processor.
inline void set_word(uint64_t* word, uint64_t generation) {
  __atomic_store_n(word, generation, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

inline bool process_lives(int pidfd) {
  pollfd process{pidfd, POLLIN, 0};
  return poll(&process, 1, 0) == 0;
}

// True if, after all earlier reads, the lease was open and its source's process alive.
inline bool word_is(const uint64_t* word, uint64_t generation, int pidfd) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(word, __ATOMIC_RELAXED) == generation && process_lives(pidfd);
}

}  // namespace baton
