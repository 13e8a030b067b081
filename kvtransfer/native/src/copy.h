// Copies of scattered records.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "records.h"

namespace baton {

struct Piece {
  int64_t source_offset, sink_offset, num_bytes;
};

// Lines of both sides are asked for this far ahead, those to be written for writing: the processor
// finds them by itself only within a page, and has to read a line before it can write a part of it.
constexpr int64_t kAheadBytes = 1024;
constexpr int64_t kChunkBytes = 512;
constexpr int64_t kLineBytes = 64;

struct Run {
  uint8_t* sink;
  const uint8_t* source;
  int64_t num_bytes;

  bool continues(const Run& last) const {
    return sink == last.sink + last.num_bytes && source == last.source + last.num_bytes;
  }
};

inline void prefetch_chunk(const Run& run, int64_t offset) {
  const int64_t end = std::min(offset + kChunkBytes, run.num_bytes);
  for (int64_t i = offset; i < end; i += kLineBytes) {
    __builtin_prefetch(run.source + i, 0, 3);
    __builtin_prefetch(run.sink + i, 1, 3);
  }
}

// Measured on a Xeon of 2.5 GHz (Cascade Lake, one core), blocks of 16 KiB to 1 MiB scattered over
// 384 MiB on both sides: 1.3 times the speed of one memcpy a block; 1.05 if only the source's lines
// are asked for. Stores past the caches reach 1.05 at best, with huge pages too, and what reads the
// copy next then waits for memory; so there are none, whoever that is.
inline void copy_run(const Run& run, const Run& next) {
  int64_t i = 0;
  for (; i + kChunkBytes <= run.num_bytes; i += kChunkBytes) {
    const int64_t ahead = i + kAheadBytes;
    if (ahead < run.num_bytes) {
      prefetch_chunk(run, ahead);
    } else {
      prefetch_chunk(next, ahead - run.num_bytes);
    }
    std::memcpy(run.sink + i, run.source + i, kChunkBytes);
  }
  std::memcpy(run.sink + i, run.source + i, static_cast<size_t>(run.num_bytes - i));
}

// Copies runs one behind the other: each is copied when it is known what follows.
class Copier {
 public:
  ~Copier() { flush({nullptr, nullptr, 0}); }

  void add(const Run& run) {
    if (run.continues(last_)) {
      last_.num_bytes += run.num_bytes;
    } else {
      flush(run);
      last_ = run;
    }
  }

 private:
  void flush(const Run& next) {
    if (last_.num_bytes > 0) copy_run(last_, next);
  }

  Run last_{nullptr, nullptr, 0};
};

// Whether it did so: nothing is written where an id or a piece is out of bounds.
inline bool copy_records(const Records& sink, const Records& source, int64_t count,
                         const Piece* pieces, int64_t num_pieces) {
  if (!sink.has_all(count) || !source.has_all(count)) return false;
  for (int64_t p = 0; p < num_pieces; ++p)
    if (!sink.has(pieces[p].sink_offset, pieces[p].num_bytes) ||
        !source.has(pieces[p].source_offset, pieces[p].num_bytes))
      return false;
  Copier copier;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t p = 0; p < num_pieces; ++p)
      copier.add({sink.row(i) + pieces[p].sink_offset, source.row(i) + pieces[p].source_offset,
                  pieces[p].num_bytes});
  return true;
}

}  // namespace baton
