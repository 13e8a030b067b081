// Sixteen floats at once, with AVX-512 or with AVX2 and FMA.
//
// Both sets give the same bits: a vector has sixteen lanes everywhere (AVX2 holds it in two
// registers), reductions have one fixed tree, and every product that is added is fused.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define BATON_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BATON_AVX512 0
#else
#error "needs AVX-512 with VNNI, or AVX2 with FMA and F16C"
#endif

namespace baton {

constexpr int kLanes = 16;

#if BATON_AVX512

using Vec = __m512;
inline Vec zeros() { return _mm512_setzero_ps(); }
inline Vec fill(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec round_even(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Lanes of `x` where a < b, else of `y`.
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// 2^n for whole n in -126 … 127.
inline Vec exp2_whole(Vec n) {
  __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
inline Vec load_bf16(const uint16_t* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline Vec load_fp16_bits(__m256i raw) { return _mm512_cvtph_ps(raw); }
inline Vec load_int8(const int8_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
}
inline Vec from_bytes(__m128i raw) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw)); }
inline Vec from_int32(const int32_t* p) {
  return _mm512_cvtepi32_ps(_mm512_loadu_si512(reinterpret_cast<const void*>(p)));
}
// Whole numbers in -128 … 127 as bytes.
inline void store_int8(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
// Lanes as 32 bits.
inline Vec bits_shifted_left(Vec x, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), n));
}
inline Vec bits_and(Vec x, uint32_t mask) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(mask)));
}
inline Vec signed_byte(Vec x, int b) {
  const __m512i high = _mm512_slli_epi32(_mm512_castps_si512(x), 24 - 8 * b);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24));
}
inline Vec nibble(Vec x, int shift) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), shift);
  return _mm512_cvtepi32_ps(_mm512_and_si512(low, _mm512_set1_epi32(15)));
}
inline __m256i bytes_as_words(Vec x, int b) {  // byte b of each lane in 16 bits
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), 8 * b);
  return _mm512_cvtepi32_epi16(_mm512_and_si512(low, _mm512_set1_epi32(255)));
}
inline __m256 low_half(Vec x) { return _mm512_castps512_ps256(x); }
inline __m256 high_half(Vec x) { return _mm512_extractf32x8_ps(x, 1); }

#else

struct Vec {
  __m256 a, b;
};
inline Vec zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
inline Vec abs(Vec a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.a), _mm256_andnot_ps(sign, a.b)};
}
inline Vec round_even(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.a, mode), _mm256_round_ps(a.b, mode)};
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
inline __m256 exp2_whole_half(__m256 n) {
  __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline Vec exp2_whole(Vec n) { return {exp2_whole_half(n.a), exp2_whole_half(n.b)}; }
inline __m256 bf16_half(const uint16_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline Vec load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline Vec load_fp16_bits(__m256i raw) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(raw)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(raw, 1))};
}
inline Vec load_int8(const int8_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)))};
}
inline Vec from_bytes(__m128i raw) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8)))};
}
inline Vec from_int32(const int32_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
          _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8)))};
}
inline void store_int8(int8_t* p, Vec x) {
  __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline __m256i as_ints(__m256 x) { return _mm256_castps_si256(x); }
inline __m256 as_floats(__m256i x) { return _mm256_castsi256_ps(x); }
inline Vec bits_shifted_left(Vec x, int n) {
  return {as_floats(_mm256_slli_epi32(as_ints(x.a), n)), as_floats(_mm256_slli_epi32(as_ints(x.b), n))};
}
inline Vec bits_and(Vec x, uint32_t mask) {
  const __m256 m = as_floats(_mm256_set1_epi32(static_cast<int>(mask)));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
inline __m256 signed_byte_half(__m256 x, int b) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(as_ints(x), 24 - 8 * b), 24));
}
inline Vec signed_byte(Vec x, int b) { return {signed_byte_half(x.a, b), signed_byte_half(x.b, b)}; }
inline __m256 nibble_half(__m256 x, int shift) {
  const __m256i low = _mm256_srli_epi32(as_ints(x), shift);
  return _mm256_cvtepi32_ps(_mm256_and_si256(low, _mm256_set1_epi32(15)));
}
inline Vec nibble(Vec x, int shift) { return {nibble_half(x.a, shift), nibble_half(x.b, shift)}; }
inline __m256i bytes_as_words(Vec x, int b) {
  const __m256i mask = _mm256_set1_epi32(255);
  const __m256i low = _mm256_and_si256(_mm256_srli_epi32(as_ints(x.a), 8 * b), mask);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi32(as_ints(x.b), 8 * b), mask);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}
inline __m256 low_half(Vec x) { return x.a; }
inline __m256 high_half(Vec x) { return x.b; }

#endif

// The sum of the lanes, in one fixed order.
inline float sum_lanes(Vec x) {
  __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float max_lanes(Vec x) {
  __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// e^x to about 2 units in the last place; exactly 0 below -87, so that masked scores weigh nothing.
inline Vec exp(Vec x) {
  const Vec lowest = fill(-87.0f);
  Vec bounded = min(max(x, lowest), fill(88.0f));
  Vec n = round_even(mul(bounded, fill(1.44269504088896341f)));
  Vec r = fma(n, fill(-0.693359375f), bounded);
  r = fma(n, fill(2.12194440e-4f), r);
  Vec p = fill(1.9875691500e-4f);
  p = fma(p, r, fill(1.3981999507e-3f));
  p = fma(p, r, fill(8.3334519073e-3f));
  p = fma(p, r, fill(4.1665795894e-2f));
  p = fma(p, r, fill(1.6666665459e-1f));
  p = fma(p, r, fill(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), fill(1.0f));
  return where_less(x, lowest, zeros(), mul(p, exp2_whole(n)));
}

inline Vec tanh(Vec x) {  // 1 - 2 / (1 + e^2x)
  Vec e = exp(add(x, x));
  return sub(fill(1.0f), div(fill(2.0f), add(fill(1.0f), e)));
}

// Transposes 8 x 8 words; row i begins `offset` bytes after rows[i].
inline void transpose8(const uint8_t* const* rows, size_t offset, float* to, size_t to_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i)
    r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset));
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i + 0] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

// Transposes 16 rows of 16 words, `offset` bytes after each of `rows`, into to [16][16].
inline void transpose(const uint8_t* const* rows, size_t offset, float* to) {
  for (int i = 0; i < kLanes; i += 8)
    for (int j = 0; j < kLanes; j += 8)
      transpose8(rows + i, offset + 4 * j, to + j * kLanes + i, kLanes);
}

inline float bf16_to_float(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t float_to_bf16(float x) {  // halves to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace baton
