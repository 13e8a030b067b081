// Tokens in the KV record: their places, and functions that write and read them.
//
// engine/layout.py defines the record and its formats. Numbers are rounded as in kvcache.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace baton {

enum Format : int32_t { kKvFp32 = 0, kKvBf16 = 1, kKvFp8 = 2, kKvInt8 = 3, kKvInt4 = 4 };

class Attention;
struct Batch;
struct Scoring;

// Attention::run over KV of one format; attention.cpp defines the function for each format.
using Attend = void (*)(Attention&, int index, const Batch&, int layer, const Scoring&,
                        const float* query, size_t query_stride, float* out, size_t out_stride,
                        float* scratch);

// One section of a buffer of blocks; mirrored in structs.py.
struct Cache {
  uint8_t* blocks;
  int64_t block_bytes;
  int64_t section_offset;
  int64_t layer_bytes;
  int64_t head_bytes;
  int64_t scales_offset;
  int32_t token_bytes;
  int32_t block_size;
  int32_t format;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t unused;
  Attend attend;
};

struct Place {
  uint8_t* elements;
  uint8_t* scale;
};

// Head h of K is plane h, head h of V is plane num_kv_heads + h.
inline Place place(const Cache& c, int layer, int plane, int64_t block, int offset) {
  uint8_t* head = c.blocks + block * c.block_bytes + c.section_offset + layer * c.layer_bytes +
                  plane * c.head_bytes;
  return {head + static_cast<int64_t>(offset) * c.token_bytes,
          head + c.scales_offset + static_cast<int64_t>(offset) * 4};
}

inline float load_float(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

// Halves round to even. Numbers above 448 become NaN, but do not occur: values are scaled to 448.
inline uint8_t float_to_fp8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t result;
  if (bits < (121u << 23)) {  // below 2^-6, adding 2^14 rounds to a whole number of 2^-9
    const float magic = 16384.0f;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += magic;
    uint32_t sum;
    std::memcpy(&sum, &magnitude, 4);
    result = sum - 0x46800000u;
  } else {
    const uint32_t odd = (bits >> 20) & 1;
    result = (bits - (120u << 23) + 0x7FFFF + odd) >> 20;
  }
  return static_cast<uint8_t>(result | (sign >> 24));
}

inline void largest_and_range(const float* x, int n, float* largest, float* low, float* high) {
  *largest = 0;
  *low = *high = x[0];
  for (int i = 0; i < n; ++i) {
    *largest = std::max(*largest, std::fabs(x[i]));
    *low = std::min(*low, x[i]);
    *high = std::max(*high, x[i]);
  }
}

inline void write_int8(Place to, const float* x, int n) {
  Vec most = zeros();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) most = max(most, abs(load(x + i)));
  float largest = max_lanes(most);
  for (; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float scale = largest / 127.0f;
  int8_t* y = reinterpret_cast<int8_t*>(to.elements);
  if (!(scale > 0)) {
    std::memset(y, 0, n);
  } else {
    const Vec step = fill(scale), limit = fill(127.0f);
    for (i = 0; i + kLanes <= n; i += kLanes) {
      const Vec q = max(min(div(load(x + i), step), limit), sub(zeros(), limit));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), to_int8(q));
    }
    for (; i < n; ++i)
      y[i] = static_cast<int8_t>(std::clamp(std::nearbyintf(x[i] / scale), -127.0f, 127.0f));
  }
  std::memcpy(to.scale, &scale, 4);
}

// Stores K or V of one token and one head.
inline void write_token(const Cache& c, Place to, const float* x) {
  const int n = c.head_dim;
  float largest, low, high;
  switch (c.format) {
    case kKvFp32: std::memcpy(to.elements, x, sizeof(float) * n); return;
    case kKvBf16:
      for (int i = 0; i < n; ++i) {
        const uint16_t y = float_to_bf16(x[i]);
        std::memcpy(to.elements + 2 * i, &y, 2);
      }
      return;
    case kKvFp8: {
      largest_and_range(x, n, &largest, &low, &high);
      const float scale = largest / 448.0f;
      for (int i = 0; i < n; ++i) to.elements[i] = scale > 0 ? float_to_fp8(x[i] / scale) : 0;
      std::memcpy(to.scale, &scale, 4);
      return;
    }
    case kKvInt8: write_int8(to, x, n); return;
    default: {
      largest_and_range(x, n, &largest, &low, &high);
      const uint16_t low_bits = float_to_bf16(low);
      const float base = bf16_to_float(low_bits);
      const uint16_t step_bits = float_to_bf16((high - base) / 15.0f);
      const float step = bf16_to_float(step_bits);
      auto level = [&](float value) {
        const float q = step > 0 ? std::nearbyintf((value - base) / step) : 0.0f;
        return static_cast<uint8_t>(std::clamp(q, 0.0f, 15.0f));
      };
      for (int i = 0; i < n / 2; ++i)
        to.elements[i] = static_cast<uint8_t>(level(x[i]) | level(x[i + n / 2]) << 4);
      std::memcpy(to.scale, &step_bits, 2);
      std::memcpy(to.scale + 2, &low_bits, 2);
      return;
    }
  }
}

inline float int4_step(Place p) {
  uint16_t x;
  std::memcpy(&x, p.scale, 2);
  return bf16_to_float(x);
}

inline float int4_low(Place p) {
  uint16_t x;
  std::memcpy(&x, p.scale + 2, 2);
  return bf16_to_float(x);
}

// Reads one element of a token, for the last elements that do not fill a vector.
inline float read_element(const Cache& c, Place from, int i) {
  switch (c.format) {
    case kKvFp32: return load_float(from.elements + 4 * i);
    case kKvBf16: {
      uint16_t x;
      std::memcpy(&x, from.elements + 2 * i, 2);
      return bf16_to_float(x);
    }
    case kKvFp8: {
      const uint8_t x = from.elements[i];
      const uint16_t half = static_cast<uint16_t>((x & 0x80) << 8 | (x & 0x7F) << 7);
      return _cvtsh_ss(half) * 256.0f;
    }
    case kKvInt8: return static_cast<float>(static_cast<int8_t>(from.elements[i]));
    default: {
      const int half = c.head_dim / 2;
      const int q = i < half ? from.elements[i] & 15 : from.elements[i - half] >> 4;
      return std::fma(static_cast<float>(q), int4_step(from), int4_low(from));
    }
  }
}

// Sixteen fp8 numbers, each in 16 bits. Shifted to fp16's places, their bits are 1/256 of the
// numbers.
BATON_INLINE Vec fp8_values(__m256i wide) {
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7F)), 7);
  return mul(load_fp16_bits(_mm256_or_si256(sign, rest)), fill(256.0f));
}

BATON_INLINE Vec fp8_values(const uint8_t* p) {
  return fp8_values(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// True for formats that are read without their scale. The caller applies the scale to whole tokens.
constexpr bool scales_apart(int32_t format) { return format == kKvFp8 || format == kKvInt8; }

// Sixteen elements of a token, from the i-th on, for formats with consecutive elements.
template <int32_t format>
BATON_INLINE Vec read_vec(Place from, int i) {
  if constexpr (format == kKvFp32) return load(reinterpret_cast<const float*>(from.elements) + i);
  if constexpr (format == kKvBf16)
    return load_bf16(reinterpret_cast<const uint16_t*>(from.elements) + i);
  if constexpr (format == kKvFp8) return fp8_values(from.elements + i);
  return load_int8(reinterpret_cast<const int8_t*>(from.elements) + i);
}

// Reads K or V of one token and one head, without the scale if scales_apart. `format` is c.format.
template <int32_t format>
BATON_INLINE void read_token(const Cache& c, Place from, float* to) {
  const int n = c.head_dim;
  int i = 0;
  if constexpr (format != kKvInt4) {
    for (; i + kLanes <= n; i += kLanes) store(to + i, read_vec<format>(from, i));
  } else if (n % (2 * kLanes) == 0) {
    const Vec step = fill(int4_step(from)), low = fill(int4_low(from));
    const __m128i lower = _mm_set1_epi8(15);
    for (; i < n / 2; i += kLanes) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.elements + i));
      const __m128i upper = _mm_and_si128(_mm_srli_epi16(raw, 4), lower);
      store(to + i, fma(from_bytes(_mm_and_si128(raw, lower)), step, low));
      store(to + n / 2 + i, fma(from_bytes(upper), step, low));
    }
    i = n;
  }
  for (; i < n; ++i) to[i] = read_element(c, from, i);
}

constexpr int kWord = 4;                     // bytes
constexpr int kGroupBytes = kLanes * kWord;  // bytes of one token that are transposed at a time

// Elements per word, and the conversion of words to elements when the lanes are tokens.
constexpr int elements_per_word(int32_t format) {
  return format == kKvFp32 ? 1 : format == kKvBf16 ? 2 : format == kKvInt4 ? 8 : 4;
}

// Writes the elements of one word of sixteen tokens: to[e * stride] for the e-th dimension.
// int4: byte b holds dimensions d and d + half.
template <int32_t format>
BATON_INLINE void expand_words(Vec raw, float* to, size_t stride, size_t half, Vec step, Vec low) {
  if constexpr (format == kKvFp32) {
    store(to, raw);
  } else if constexpr (format == kKvBf16) {
    store(to, bits_shifted_left(raw, 16));
    store(to + stride, bits_and(raw, 0xFFFF0000u));
  } else if constexpr (format == kKvInt8) {
    store(to, signed_byte(raw, 0));
    store(to + stride, signed_byte(raw, 1));
    store(to + 2 * stride, signed_byte(raw, 2));
    store(to + 3 * stride, signed_byte(raw, 3));
  } else if constexpr (format == kKvFp8) {
    for (int b = 0; b < 4; ++b) store(to + b * stride, fp8_values(bytes_as_words(raw, b)));
  } else {
    for (int b = 0; b < 4; ++b) {
      store(to + b * stride, fma(nibble(raw, 8 * b), step, low));
      store(to + (b + half) * stride, fma(nibble(raw, 8 * b + 4), step, low));
    }
  }
}

}  // namespace baton
