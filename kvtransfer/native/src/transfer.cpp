// The functions that Python calls through ctypes: see library.py. Each runs on the caller's thread and
// keeps no state, so any number of threads may call at once.
#include "convert.h"
#include "copy.h"
#include "sealing.h"
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

// Seals bytes; the tag follows them. Returns 0 if the cipher failed.
int32_t baton_seal_bytes(const Cipher* cipher, uint64_t number, const uint8_t* in,
                         int64_t num_bytes, uint8_t* out) {
  Box box(*cipher, number);
  box.update(out, in, num_bytes);
  return box.seal(out + num_bytes);
}

// Opens what the function above sealed. Returns 0 if it was changed.
int32_t baton_open_bytes(const Cipher* cipher, uint64_t number, const uint8_t* in,
                         int64_t num_bytes, uint8_t* out) {
  Box box(*cipher, number);
  box.update(out, in, num_bytes);
  return box.open(in + num_bytes);
}

// Seals the pieces of records into a frame and its tag. Returns 0, with nothing written, if an id or a
// piece is out of bounds or the pieces do not fill the frame; or if the cipher failed.
int32_t baton_seal_records(const Cipher* cipher, uint64_t number, const Records* frame,
                           const Records* source, int64_t count, const Piece* pieces,
                           int64_t num_pieces, uint8_t* tag) {
  const Copies copies{*frame, *source, count, pieces, num_pieces};
  return copies.are_within_bounds() &&
         fill_records(pieces, num_pieces, frame->record_bytes, &Piece::sink_offset) &&
         seal_records(*cipher, number, copies, tag);
}

// Opens a frame of records into those that the sink's ids name; those with a negative id where they
// lie. Returns 0 if it was changed, or as the function above.
int32_t baton_open_records(const Cipher* cipher, uint64_t number, const Records* sink,
                           const Records* frame, int64_t count, const Piece* pieces,
                           int64_t num_pieces, const uint8_t* tag) {
  const Copies copies{*sink, *frame, count, pieces, num_pieces};
  return copies.are_within_bounds_or_unplaced() &&
         fill_records(pieces, num_pieces, frame->record_bytes, &Piece::source_offset) &&
         open_records(*cipher, number, copies, tag);
}

// Sets a lease's word.
void baton_set_word(uint64_t* word, uint64_t generation) { set_word(word, generation); }

// Returns 1 if a lease's word has that generation and its source's process lives.
int32_t baton_word_is(const uint64_t* word, uint64_t generation, int32_t pidfd) {
  return word_is(word, generation, pidfd);
}

}  // extern "C"
