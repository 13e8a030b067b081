// The functions that Python calls through ctypes: see library.py. Each runs on the caller's thread and
// keeps no state, so any number of threads may call at once.
#include "convert.h"
#include "copy.h"
#include "words.h"

using namespace baton;

extern "C" {

// Copies the pieces. Returns 0, and copies nothing, if an id or a piece is out of bounds.
int32_t baton_copy_records(const Records* sink, const Records* source, int64_t count,
                           const Piece* pieces, int64_t num_pieces) {
  const Copies copies{*sink, *source, count, pieces, num_pieces};
  if (!copies.are_within_bounds()) return false;
  copies.perform();
  return true;
}

// The same if the sink is a frame, and its checksum. Returns 0 if the frame is too short.
int32_t baton_gather_records(const Records* frame, const Records* source, int64_t count,
                             const Piece* pieces, int64_t num_pieces, uint64_t* checksum) {
  const Copies copies{*frame, *source, count, pieces, num_pieces};
  if (!copies.are_within_bounds() || !can_be_hashed(*frame)) return false;
  *checksum = gather(copies);
  return true;
}

// The same if the source is a frame.
int32_t baton_scatter_records(const Records* sink, const Records* frame, int64_t count,
                              const Piece* pieces, int64_t num_pieces, uint64_t* checksum) {
  const Copies copies{*sink, *frame, count, pieces, num_pieces};
  if (!copies.are_within_bounds() || !can_be_hashed(*frame)) return false;
  *checksum = scatter(copies);
  return true;
}

// Converts record i of the source, in the format `from`, to record i of the sink, in the format `to`.
// Both have `num_records`; the sections describe their layouts.
void baton_convert_records(const Section* sections, int64_t num_sections, int64_t block_size,
                           int32_t from, int32_t to, const Records* source, const Records* sink) {
  convert_records(sections, num_sections, block_size, converter(from, to), *source, *sink);
}

// Sets a lease's word.
void baton_set_word(uint64_t* word, uint64_t generation) { set_word(word, generation); }

// Returns 1 if a lease's word has that generation and its source's process lives.
int32_t baton_word_is(const uint64_t* word, uint64_t generation, int32_t pidfd) {
  return word_is(word, generation, pidfd);
}

}  // extern "C"
