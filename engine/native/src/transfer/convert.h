// Converts records from one KV format to another, token by token.
//
// engine/layout.py defines the formats and the record. Numbers are rounded as in
// engine/model/attention/kvcache.py, bit for bit. formats.py does the same in numpy. Loops are
// written so that the compiler can vectorise them: minima and maxima are computed of integers,
// which the compiler may reorder.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "records.h"

namespace baton {

enum Format : int32_t { kFp32 = 0, kBf16 = 1, kFp8 = 2, kInt8 = 3, kInt4 = 4 };

constexpr int kScaleBytes = 4;
constexpr uint32_t kMagnitude = 0x7FFFFFFF;  // all bits of a float except its sign

// The place of one section in records of one format; mirrored in structs.py.
struct Heads {
  int64_t section_offset;
  int64_t head_bytes;
  int64_t token_bytes;
  int64_t scales_offset;
};

// One section of both records; mirrored in structs.py.
struct Section {
  Heads source, sink;
  int64_t num_heads;  // number of heads of K and V, in all layers
  int64_t head_dim;
};

inline float bf16_to_float(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

inline uint16_t float_to_bf16(float x) {  // halves to even; NaN stays NaN
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & kMagnitude) > 0x7F800000;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

// Halves round to even. Numbers must not exceed 448; for larger numbers the result is wrong.
inline uint8_t float_to_fp8(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & kMagnitude;
  // Below 2^-6, adding 2^14 rounds to a whole number of 2^-9, the smallest step.
  const uint32_t small =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 16384.0f) - 0x46800000u;
  const uint32_t large = (magnitude - (120u << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20;
  const uint32_t result = magnitude < (121u << 23) ? small : large;
  return static_cast<uint8_t>(result | (bits >> 31 << 7));
}

inline float fp8_to_float(uint8_t x) {
  const uint32_t magnitude = x & 0x7F, sign = static_cast<uint32_t>(x >> 7) << 31;
  const float steps = static_cast<float>(magnitude) * 0x1p-9f;  // below 2^-6
  const uint32_t small = std::bit_cast<uint32_t>(steps);
  const uint32_t large = magnitude == 0x7F ? 0x7FC00000u : (magnitude << 20) + (120u << 23);
  return std::bit_cast<float>((magnitude < 8 ? small : large) | sign);
}

// If a scale or step is zero, the stored number is the remainder, which is almost zero.
inline float divisor(float scale) { return scale == 0 ? 1.0f : scale; }

inline float largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & kMagnitude);
  return std::bit_cast<float>(largest);
}

// Maps floats to integers of the same order (with -0 below 0), and back.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & kMagnitude); }

struct Range {
  float low, high;
};

inline Range range(const float* x, int64_t n) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t place = ordered(std::bit_cast<int32_t>(x[i]));
    low = std::min(low, place);
    high = std::max(high, place);
  }
  return {std::bit_cast<float>(ordered(low)), std::bit_cast<float>(ordered(high))};
}

// Clamps x to low ... high; NaN becomes one of the limits.
inline float clamped(float x, float low, float high) {
  const float above = x > low ? x : low;
  return above < high ? above : high;
}

template <int32_t format>
void write_token(const float* x, int64_t n, uint8_t* elements, uint8_t* scale_bytes) {
  if constexpr (format == kFp32) {
    std::memcpy(elements, x, sizeof(float) * n);
  } else if constexpr (format == kBf16) {
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t y = float_to_bf16(x[i]);
      std::memcpy(elements + 2 * i, &y, sizeof y);
    }
  } else if constexpr (format == kFp8 || format == kInt8) {
    constexpr float kLargest = format == kFp8 ? 448.0f : 127.0f;
    const float scale = largest_magnitude(x, n) / kLargest, by = divisor(scale);
    for (int64_t i = 0; i < n; ++i) {
      const float scaled = clamped(x[i] / by, -kLargest, kLargest);
      if constexpr (format == kFp8) {
        elements[i] = float_to_fp8(scaled);
      } else {
        elements[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(scaled)));
      }
    }
    std::memcpy(scale_bytes, &scale, sizeof scale);
  } else {
    const Range all = range(x, n);
    const uint16_t low_bits = float_to_bf16(all.low);
    const float low = bf16_to_float(low_bits);
    const uint16_t step_bits = float_to_bf16((all.high - low) / 15.0f);
    const float by = divisor(bf16_to_float(step_bits));
    const auto level = [&](float value) {
      return static_cast<uint32_t>(clamped(std::nearbyint((value - low) / by), 0.0f, 15.0f));
    };
    const int64_t half = n / 2;
    for (int64_t i = 0; i < half; ++i)
      elements[i] = static_cast<uint8_t>(level(x[i]) | level(x[i + half]) << 4);
    std::memcpy(scale_bytes, &step_bits, sizeof step_bits);
    std::memcpy(scale_bytes + 2, &low_bits, sizeof low_bits);
  }
}

template <int32_t format>
void read_token(const uint8_t* elements, const uint8_t* scale_bytes, int64_t n, float* x) {
  if constexpr (format == kFp32) {
    std::memcpy(x, elements, sizeof(float) * n);
  } else if constexpr (format == kBf16) {
    for (int64_t i = 0; i < n; ++i) {
      uint16_t y;
      std::memcpy(&y, elements + 2 * i, sizeof y);
      x[i] = bf16_to_float(y);
    }
  } else if constexpr (format == kFp8 || format == kInt8) {
    float scale;
    std::memcpy(&scale, scale_bytes, sizeof scale);
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (format == kFp8) {
        x[i] = fp8_to_float(elements[i]) * scale;
      } else {
        x[i] = static_cast<float>(static_cast<int8_t>(elements[i])) * scale;
      }
    }
  } else {
    uint16_t step_bits, low_bits;
    std::memcpy(&step_bits, scale_bytes, sizeof step_bits);
    std::memcpy(&low_bits, scale_bytes + 2, sizeof low_bits);
    const float step = bf16_to_float(step_bits), low = bf16_to_float(low_bits);
    const int64_t half = n / 2;
    for (int64_t i = 0; i < half; ++i) {
      x[i] = low + static_cast<float>(elements[i] & 15) * step;
      x[i + half] = low + static_cast<float>(elements[i] >> 4) * step;
    }
  }
}

constexpr bool has_scales(int32_t format) { return format >= kFp8; }

template <int32_t format>
void clear_padding(const Heads& heads, int64_t block_size, uint8_t* head) {
  const auto clear = [&](int64_t begin, int64_t end) {
    std::memset(head + begin, 0, static_cast<size_t>(end - begin));
  };
  clear(block_size * heads.token_bytes, heads.scales_offset);
  if (has_scales(format)) clear(heads.scales_offset + block_size * kScaleBytes, heads.head_bytes);
}

template <int32_t from, int32_t to>
void convert_section(const Section& section, int64_t block_size, const uint8_t* source,
                     uint8_t* sink, float* token) {
  source += section.source.section_offset;
  sink += section.sink.section_offset;
  for (int64_t head = 0; head < section.num_heads; ++head) {
    for (int64_t i = 0; i < block_size; ++i) {
      read_token<from>(source + i * section.source.token_bytes,
                       source + section.source.scales_offset + i * kScaleBytes, section.head_dim,
                       token);
      write_token<to>(token, section.head_dim, sink + i * section.sink.token_bytes,
                      sink + section.sink.scales_offset + i * kScaleBytes);
    }
    clear_padding<to>(section.sink, block_size, sink);
    source += section.source.head_bytes;
    sink += section.sink.head_bytes;
  }
}

using ConvertSection = void (*)(const Section&, int64_t, const uint8_t*, uint8_t*, float*);

template <int32_t from>
ConvertSection converter_to(int32_t to) {
  switch (to) {
    case kFp32: return convert_section<from, kFp32>;
    case kBf16: return convert_section<from, kBf16>;
    case kFp8: return convert_section<from, kFp8>;
    case kInt8: return convert_section<from, kInt8>;
    default: return convert_section<from, kInt4>;
  }
}

inline ConvertSection converter(int32_t from, int32_t to) {
  switch (from) {
    case kFp32: return converter_to<kFp32>(to);
    case kBf16: return converter_to<kBf16>(to);
    case kFp8: return converter_to<kFp8>(to);
    case kInt8: return converter_to<kInt8>(to);
    default: return converter_to<kInt4>(to);
  }
}

inline void convert_records(const Section* sections, int64_t num_sections, int64_t block_size,
                            ConvertSection convert, const Records& source, const Records& sink) {
  int64_t head_dim = 0;
  for (int64_t s = 0; s < num_sections; ++s) head_dim = std::max(head_dim, sections[s].head_dim);
  std::vector<float> token(static_cast<size_t>(head_dim));
  for (int64_t i = 0; i < source.num_records; ++i)
    for (int64_t s = 0; s < num_sections; ++s)
      convert(sections[s], block_size, source.row(i), sink.row(i), token.data());
}

}  // namespace baton
