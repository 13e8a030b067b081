// Encrypts scattered records into one box and opens a box into scattered records, with AES-256-GCM of
// OpenSSL's libcrypto. Its functions come from Python: the library is found when a process starts.
//
// A box is as long as what it holds, and a tag. Each box of a key has a number of its own, its nonce.
#pragma once

#include <cstdint>
#include <cstring>

#include "copy.h"

namespace baton {

// Functions of libcrypto and a context with its key, of one direction; mirrored in sealing.py.
struct Cipher {
  int (*init)(void* context, const void* type, void* engine, const uint8_t* key,
              const uint8_t* nonce, int encrypts);
  int (*update)(void* context, uint8_t* out, int* out_bytes, const uint8_t* in, int in_bytes);
  int (*final)(void* context, uint8_t* out, int* out_bytes);
  int (*control)(void* context, int type, int argument, void* pointer);
  void* context;
};

class Box {
 public:
  static constexpr int kTagBytes = 16;

  Box(const Cipher& cipher, uint64_t number) : cipher_(cipher) {
    uint8_t nonce[12] = {};
    std::memcpy(nonce + 4, &number, sizeof number);
    ok_ = cipher.init(cipher.context, nullptr, nullptr, nullptr, nonce, -1) == 1;
  }

  void update(uint8_t* out, const uint8_t* in, int64_t num_bytes) {
    int written = 0;
    if (num_bytes > 0)
      ok_ = ok_ &&
            cipher_.update(cipher_.context, out, &written, in, static_cast<int>(num_bytes)) == 1;
  }

  bool seal(uint8_t* tag) {
    int written = 0;
    uint8_t none[kTagBytes];
    ok_ = ok_ && cipher_.final(cipher_.context, none, &written) == 1;
    return ok_ && cipher_.control(cipher_.context, kGetTag, kTagBytes, tag) == 1;
  }

  // True if nothing was changed on the way.
  bool open(const uint8_t* tag) {
    int written = 0;
    uint8_t copy[kTagBytes], none[kTagBytes];
    std::memcpy(copy, tag, kTagBytes);
    ok_ = ok_ && cipher_.control(cipher_.context, kSetTag, kTagBytes, copy) == 1;
    return ok_ && cipher_.final(cipher_.context, none, &written) == 1;
  }

 private:
  static constexpr int kGetTag = 0x10, kSetTag = 0x11;  // of openssl/evp.h

  const Cipher& cipher_;
  bool ok_;
};

// Whether the pieces are the whole record of that side, in order and without gaps.
inline bool fill_records(const Piece* pieces, int64_t num_pieces, int64_t record_bytes,
                         int64_t Piece::* offset) {
  int64_t end = 0;
  for (int64_t p = 0; p < num_pieces; end += pieces[p++].num_bytes)
    if (pieces[p].*offset != end) return false;
  return end == record_bytes;
}

// Encrypts the pieces of each record into the box, which holds the records that the pieces form.
inline bool seal_records(const Cipher& cipher, uint64_t number, const Copies& copies,
                         uint8_t* tag) {
  Box box(cipher, number);
  for (int64_t i = 0; i < copies.count; ++i)
    for (int64_t p = 0; p < copies.num_pieces; ++p) {
      const Piece& piece = copies.pieces[p];
      box.update(copies.sink.row(i) + piece.sink_offset, copies.source.row(i) + piece.source_offset,
                 piece.num_bytes);
    }
  return box.seal(tag);
}

// Decrypts the records of a box into the records that the sink's ids name. A record with a negative id
// is decrypted where it lies. Whether the bytes are genuine is known at the end.
inline bool open_records(const Cipher& cipher, uint64_t number, const Copies& copies,
                         const uint8_t* tag) {
  Box box(cipher, number);
  for (int64_t i = 0; i < copies.count; ++i)
    for (int64_t p = 0; p < copies.num_pieces; ++p) {
      const Piece& piece = copies.pieces[p];
      uint8_t* source = copies.source.row(i) + piece.source_offset;
      uint8_t* sink = copies.sink.ids[i] < 0 ? source : copies.sink.row(i) + piece.sink_offset;
      box.update(sink, source, piece.num_bytes);
    }
  return box.open(tag);
}

}  // namespace baton
