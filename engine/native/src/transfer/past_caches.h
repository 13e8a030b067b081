// Copies bytes that are not read again soon on this core: stores go past its caches.
//
// Measured on a Xeon with AVX-512 (Sapphire Rapids, one core), 64 MiB in scattered blocks of 64 KiB, in
// shared memory with pages of 4 KiB, GiB/s:
//
//     one memcpy a block, or `rep movsb`                          7.0
//     both sides prefetched, stores into the caches               7.2
//     stores past the caches                                      9.0
//     the same, four segments of 4 KiB side by side              10.9
//
// On an older one (Cascade Lake) plain stores past the caches reached 1.05 of memcpy, and prefetching
// both sides 1.3. Side by side was not measured there.
//
// Side by side, because the processor prefetches only within a page by itself: with four pages under
// way, one is always far enough ahead. Stores past the caches read no line before they write it.
//
// The next reader of the copy then waits for memory. On another core it waits as long as for lines in
// this core's cache: 1 MiB takes 76 us to read, not 63, and 36 us less to copy. On this core the loss
// is as large as the gain up to 1 MiB, and none from 4 MiB on. So all sizes are copied this way.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace baton {

constexpr int64_t kLineBytes = 64;

// Bytes to copy from one place to another.
struct Run {
  uint8_t* sink;
  const uint8_t* source;
  int64_t num_bytes;

  bool continues(const Run& last) const {
    return sink == last.sink + last.num_bytes && source == last.source + last.num_bytes;
  }
};

// Copies a line; the sink's lies on a cache line.
inline void copy_line_past_caches(uint8_t* sink, const uint8_t* source) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(sink), _mm512_loadu_si512(source));
#elif defined(__AVX2__)
  for (int i = 0; i < kLineBytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(sink + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
#else
  for (int i = 0; i < kLineBytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(sink + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
#endif
}

// Copies runs in any order, four segments at a time. The destructor returns after all bytes are
// visible, also to other threads.
class PastCaches {
 public:
  PastCaches() = default;
  PastCaches(const PastCaches&) = delete;
  PastCaches& operator=(const PastCaches&) = delete;

  ~PastCaches() {
    while (num_segments_ > 0) copy_side_by_side();
    _mm_sfence();  // these stores are not ordered with the stores that publish the bytes
  }

  void add(Run run) {
    run = without_ends(run);
    while (run.num_bytes > 0) {
      const int64_t num_bytes = std::min(run.num_bytes, kSegmentBytes);
      segments_[num_segments_++] = {run.sink, run.source, num_bytes};
      if (num_segments_ == 2 * kAtOnce) copy_side_by_side();
      run = {run.sink + num_bytes, run.source + num_bytes, run.num_bytes - num_bytes};
    }
  }

 private:
  static constexpr int64_t kSegmentBytes = 4096;
  static constexpr int64_t kAheadBytes = 512;
  static constexpr int64_t kStepBytes = 2 * kLineBytes;
  static constexpr int kAtOnce = 4;

  // Copies the ends of a run that do not fill whole steps of the sink's lines. Returns the rest.
  static Run without_ends(const Run& run) {
    const int64_t past = reinterpret_cast<uintptr_t>(run.sink) % kLineBytes;
    const int64_t head = std::min(past ? kLineBytes - past : 0, run.num_bytes);
    const int64_t body = (run.num_bytes - head) / kStepBytes * kStepBytes;
    std::memcpy(run.sink, run.source, static_cast<size_t>(head));
    std::memcpy(run.sink + head + body, run.source + head + body,
                static_cast<size_t>(run.num_bytes - head - body));
    return {run.sink + head, run.source + head, body};
  }

  // Copies the oldest segments, and prefetches the beginnings of the segments after them.
  void copy_side_by_side() {
    const int num = std::min(num_segments_, kAtOnce);
    int64_t longest = 0;
    for (int n = 0; n < num; ++n) longest = std::max(longest, segments_[n].num_bytes);
    for (int64_t i = 0; i < longest; i += kStepBytes) {
      for (int n = 0; n < num; ++n) prefetch_step(n, i + kAheadBytes);
      for (int n = 0; n < num; ++n) copy_step(segments_[n], i);
    }
    num_segments_ -= num;
    std::copy(segments_ + kAtOnce, segments_ + kAtOnce + num_segments_, segments_);
  }

  void prefetch_step(int n, int64_t offset) const {
    const Run& segment = segments_[n];
    const uint8_t* place = segment.source + offset;
    if (offset >= segment.num_bytes) {
      if (n + kAtOnce >= num_segments_) return;
      place = segments_[n + kAtOnce].source + offset - segment.num_bytes;
    }
    __builtin_prefetch(place, 0, 3);
    __builtin_prefetch(place + kLineBytes, 0, 3);
  }

  static void copy_step(const Run& segment, int64_t offset) {
    if (offset >= segment.num_bytes) return;
    copy_line_past_caches(segment.sink + offset, segment.source + offset);
    copy_line_past_caches(segment.sink + offset + kLineBytes, segment.source + offset + kLineBytes);
  }

  Run segments_[2 * kAtOnce];  // oldest first
  int num_segments_ = 0;
};

}  // namespace baton
