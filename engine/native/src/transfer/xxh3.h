// XXH3-64 of more than 240 bytes, with seed 0 and the default secret, computed as bytes arrive.
//
// Written from xxHash's specification (doc/xxhash_spec.md, version 0.2.0). In the specification, a
// stripe is 64 bytes, which are added to eight lanes of 64 bits. A block is 16 stripes. After each
// block the lanes are scrambled.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace baton {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

// As many lanes as the processor computes at once. For (x mod 2^32) * (x / 2^32) compilers emit a
// product of 64 by 64 bits, which takes three times as long, so intrinsics are used.
#if defined(__AVX512F__)
using Lanes [[gnu::vector_size(64)]] = uint64_t;

inline Lanes product_of_halves(Lanes x) {
  return (Lanes)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32));
}
inline Lanes neighbours(Lanes x) { return (Lanes)_mm512_shuffle_epi32((__m512i)x, _MM_PERM_BADC); }
#elif defined(__AVX2__)
using Lanes [[gnu::vector_size(32)]] = uint64_t;

inline Lanes product_of_halves(Lanes x) {
  return (Lanes)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
}
inline Lanes neighbours(Lanes x) { return (Lanes)_mm256_shuffle_epi32((__m256i)x, 0x4E); }
#else
using Lanes [[gnu::vector_size(16)]] = uint64_t;

inline Lanes product_of_halves(Lanes x) {
  return (Lanes)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32));
}
inline Lanes neighbours(Lanes x) { return (Lanes)_mm_shuffle_epi32((__m128i)x, 0x4E); }
#endif

class Xxh3 {
 public:
  static constexpr int64_t kFewestBytes = 241;  // shorter input is hashed by another algorithm

  // The bytes may arrive after the call.
  Xxh3(const uint8_t* bytes, int64_t num_bytes)
      : next_(bytes), end_(bytes + num_bytes), num_bytes_(num_bytes) {
    std::memcpy(lanes_, kInitialLanes, sizeof lanes_);
  }

  // All bytes before `there` have arrived and stay unchanged. Hashes the blocks that are now
  // complete.
  void advance(const uint8_t* there) {
    for (; next_ + kBlockBytes <= there && next_ + kBlockBytes < end_; next_ += kBlockBytes) {
      accumulate(next_, kBlockStripes, kSecret);
      scramble();
    }
  }

  // Must be called after all bytes have arrived. The last block is not scrambled. Its last stripe
  // may overlap the stripe before it.
  uint64_t digest() {
    advance(end_);
    accumulate(next_, (end_ - next_ - 1) / kStripeBytes, kSecret);
    accumulate(end_ - kStripeBytes, 1, kSecret + kSecretBytes - kStripeBytes - 7);
    return merged();
  }

 private:
  static constexpr int64_t kNumLanes = 8;
  static constexpr int64_t kStripeBytes = kNumLanes * sizeof(uint64_t);
  static constexpr int64_t kBlockStripes = 16;
  static constexpr int64_t kBlockBytes = kBlockStripes * kStripeBytes;
  static constexpr int64_t kNumVectors = kStripeBytes / sizeof(Lanes);

  static constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime64_1 = 0x9E3779B185EBCA87;
  static constexpr uint64_t kInitialLanes[kNumLanes] = {
      0xC2B2AE3D,         kPrime64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
      0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, kPrime32_1};

  static constexpr int64_t kSecretBytes = 192;
  static constexpr uint8_t kSecret[kSecretBytes] = {
      0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad,
      0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
      0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc,
      0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
      0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65,
      0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
      0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9,
      0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
      0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb,
      0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0,
      0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d,
      0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
      0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

  template <class T>
  static T read(const uint8_t* bytes) {
    T result;
    std::memcpy(&result, bytes, sizeof result);
    return result;
  }

  // Adds to each lane the product of its own halves, and the words of the neighbouring lane. The
  // words are first summed separately, so that lanes are swapped once for all stripes.
  void accumulate(const uint8_t* stripes, int64_t num_stripes, const uint8_t* secret) {
    for (int64_t v = 0; v < kNumVectors; ++v) {
      const int64_t offset = v * static_cast<int64_t>(sizeof(Lanes));
      Lanes words{}, lanes = lanes_[v];
#pragma GCC unroll 16
      for (int64_t n = 0; n < num_stripes; ++n) {
        const Lanes word = read<Lanes>(stripes + n * kStripeBytes + offset);
        words += word;
        lanes += product_of_halves(word ^ read<Lanes>(secret + n * 8 + offset));
      }
      lanes_[v] = lanes + neighbours(words);
    }
  }

  void scramble() {
    const uint8_t* secret = kSecret + kSecretBytes - kStripeBytes;
    for (int64_t v = 0; v < kNumVectors; ++v) {
      const Lanes mixed = lanes_[v] ^ (lanes_[v] >> 47);
      lanes_[v] = (mixed ^ read<Lanes>(secret + v * sizeof(Lanes))) * kPrime32_1;
    }
  }

  uint64_t merged() const {
    uint64_t lanes[kNumLanes];
    std::memcpy(lanes, lanes_, sizeof lanes);
    for (int i = 0; i < kNumLanes; ++i) lanes[i] ^= read<uint64_t>(kSecret + 11 + 8 * i);
    uint64_t result = static_cast<uint64_t>(num_bytes_) * kPrime64_1;
    for (int i = 0; i < kNumLanes; i += 2) {
      const auto product = static_cast<unsigned __int128>(lanes[i]) * lanes[i + 1];
      result += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    result = (result ^ (result >> 37)) * 0x165667919E3779F9;
    return result ^ (result >> 32);
  }

  Lanes lanes_[kNumVectors];
  const uint8_t* next_;  // the first byte that is not hashed yet
  const uint8_t* end_;
  int64_t num_bytes_;
};

}  // namespace baton
