// What Python calls, through ctypes: see library.py. Every function runs on the caller's thread and
// keeps no state, so any number of threads may call at once.
#include "convert.h"
#include "copy.h"

using namespace baton;

extern "C" {

// Whether the pieces were copied: nothing is where an id or a piece is out of bounds.
int32_t baton_copy_records(const Records* sink, const Records* source, int64_t count,
                           const Piece* pieces, int64_t num_pieces) {
  const Copies copies{*sink, *source, count, pieces, num_pieces};
  if (!copies.are_within_bounds()) return false;
  copies.perform();
  return true;
}

// The same where the sink is a frame, whose checksum is found too: none is where it is too short.
int32_t baton_gather_records(const Records* frame, const Records* source, int64_t count,
                             const Piece* pieces, int64_t num_pieces, uint64_t* checksum) {
  const Copies copies{*frame, *source, count, pieces, num_pieces};
  if (!copies.are_within_bounds() || !can_be_hashed(*frame)) return false;
  *checksum = gather(copies);
  return true;
}

// The same where the source is a frame.
int32_t baton_scatter_records(const Records* sink, const Records* frame, int64_t count,
                              const Piece* pieces, int64_t num_pieces, uint64_t* checksum) {
  const Copies copies{*sink, *frame, count, pieces, num_pieces};
  if (!copies.are_within_bounds() || !can_be_hashed(*frame)) return false;
  *checksum = scatter(copies);
  return true;
}

// Record i of the source, in the format `from`, becomes record i of the sink, in the format `to`;
// both have `num_records`, and the sections say how they lie.
void baton_convert_records(const Section* sections, int64_t num_sections, int64_t block_size,
                           int32_t from, int32_t to, const Records* source, const Records* sink) {
  convert_records(sections, num_sections, block_size, converter(from, to), *source, *sink);
}

}  // extern "C"
