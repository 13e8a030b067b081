// The functions that Python calls through ctypes: see library.py. Each function runs on the
// caller's thread and keeps no state, so several threads may call it at the same time.
#include "aegis.h"
#include "convert.h"
#include "copy.h"
#include "stream.h"
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

// Does the same for a frame as the sink, and computes its checksum. Returns 0 if the frame is too
// short.
int32_t baton_gather_records(const Records* frame, const Records* source, int64_t count,
                             const Piece* pieces, int64_t num_pieces, uint64_t* checksum) {
  const Copies copies{*frame, *source, count, pieces, num_pieces};
  if (!copies.are_within_bounds() || !can_be_hashed(*frame)) return false;
  *checksum = gather(copies);
  return true;
}

// Does the same for a frame as the source.
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

// Sets the functions of AEGIS in several lanes. Returns the number of lanes; without VAES sets
// nothing and returns 1.
int32_t baton_wide_cipher([[maybe_unused]] Cipher* cipher) {
#if defined(__VAES__) && defined(__AVX2__)
  *cipher = {aegis_seal, aegis_open};
#endif
  return kAegisLanes;
}

// Returns a sealed stream over a connection, which the caller still owns. One thread at a time may
// use the stream.
void* baton_stream_open(int32_t fd, const Cipher* cipher, const uint8_t* key, int32_t is_source) {
  return new Stream(fd, *cipher, key, is_source);
}

void baton_stream_close(void* stream) { delete static_cast<Stream*>(stream); }

// Seals a note and begins a frame; the next function sends the note. Returns 0 if there is no room.
int32_t baton_stream_note(void* stream, const char* bytes, int64_t num_bytes) {
  return static_cast<Stream*>(stream)->sender.note(reinterpret_cast<const uint8_t*>(bytes),
                                                   num_bytes);
}

// Continues with the records of a frame, for about `budget` bytes. Returns a Stop; kBad, with
// nothing sent, if an id is out of bounds.
int32_t baton_stream_send(void* stream, const Records* source, int64_t count, int64_t budget,
                          int32_t others) {
  if (!source->has_all(count)) return static_cast<int32_t>(Stop::kBad);
  return static_cast<int32_t>(
      static_cast<Stream*>(stream)->sender.send(*source, count, budget, others));
}

// Receives about `budget` bytes into the records of a frame. Returns a Stop.
int32_t baton_stream_receive(void* stream, const Records* sink, int64_t count, int64_t budget,
                             int32_t others, Received* received) {
  const bool fits =
      std::all_of(sink->ids, sink->ids + count, [&](int64_t id) { return id < sink->num_records; });
  if (!fits) return static_cast<int32_t>(Stop::kBad);
  return static_cast<int32_t>(
      static_cast<Stream*>(stream)->receiver.receive(*sink, count, budget, others, received));
}

// Sets a lease's word.
void baton_set_word(uint64_t* word, uint64_t generation) { set_word(word, generation); }

// Returns 1 if a lease's word has this generation, and the process of the lease's source is alive.
int32_t baton_word_is(const uint64_t* word, uint64_t generation, int32_t pidfd) {
  return word_is(word, generation, pidfd);
}

}  // extern "C"
