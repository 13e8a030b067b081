// What Python calls, through ctypes: see library.py. Every function runs on the caller's thread and
// keeps no state, so any number of threads may call at once.
#include "convert.h"
#include "copy.h"

using namespace baton;

extern "C" {

// Whether the pieces were copied: nothing is where an id or a piece is out of bounds.
int32_t baton_copy_records(const Records* sink, const Records* source, int64_t count,
                           const Piece* pieces, int64_t num_pieces) {
  return copy_records(*sink, *source, count, pieces, num_pieces);
}

// Record i of the source, in the format `from`, becomes record i of the sink, in the format `to`;
// both have `num_records`, and the sections say how they lie.
void baton_convert_records(const Section* sections, int64_t num_sections, int64_t block_size,
                           int32_t from, int32_t to, const Records* source, const Records* sink) {
  convert_records(sections, num_sections, block_size, converter(from, to), *source, *sink);
}

}  // extern "C"
