// Sixteen floats at once, with AVX-512 or with AVX2 and FMA.
//
// Both instruction sets give the same bits: a vector always has sixteen lanes (two registers with
// AVX2), reductions have one fixed tree, and every product that is added is fused.
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

// For functions whose data must stay in registers: compilers stop inlining in large files.
#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

constexpr int kLanes = 16;
constexpr uint32_t kSqrtHalfBits = 0x3F3504F3;  // bits of the float nearest to sqrt(1/2)

#if BATON_AVX512

using Vec = __m512;
BATON_INLINE Vec zeros() { return _mm512_setzero_ps(); }
BATON_INLINE Vec fill(float x) { return _mm512_set1_ps(x); }
BATON_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
BATON_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
BATON_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
BATON_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
BATON_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
BATON_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
BATON_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
BATON_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
BATON_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
BATON_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
BATON_INLINE Vec round_even(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Lanes of `x` where a < b, other lanes of `y`.
BATON_INLINE Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// 2^n for whole n in -126 … 127.
BATON_INLINE Vec exp2_whole(Vec n) {
  __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
BATON_INLINE Vec load_bf16(const uint16_t* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
BATON_INLINE Vec load_fp16_bits(__m256i raw) { return _mm512_cvtph_ps(raw); }
BATON_INLINE Vec load_int8(const int8_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
}
BATON_INLINE Vec from_bytes(__m128i raw) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw)); }
// Numbers in -128 … 127 as bytes. Halves round to even.
BATON_INLINE __m128i to_int8(Vec x) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)); }
// Lanes as 32 bits.
BATON_INLINE Vec bits_shifted_left(Vec x, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), n));
}
BATON_INLINE Vec bits_and(Vec x, uint32_t mask) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(mask)));
}
BATON_INLINE Vec signed_byte(Vec x, int b) {
  const __m512i high = _mm512_slli_epi32(_mm512_castps_si512(x), 24 - 8 * b);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24));
}
BATON_INLINE Vec nibble(Vec x, int shift) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), shift);
  return _mm512_cvtepi32_ps(_mm512_and_si512(low, _mm512_set1_epi32(15)));
}
BATON_INLINE __m256i bytes_as_words(Vec x, int b) {  // byte b of each lane in 16 bits
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), 8 * b);
  return _mm512_cvtepi32_epi16(_mm512_and_si512(low, _mm512_set1_epi32(255)));
}
BATON_INLINE __m256 low_half(Vec x) { return _mm512_castps512_ps256(x); }
BATON_INLINE __m256 high_half(Vec x) { return _mm512_extractf32x8_ps(x, 1); }

using Words = __m512i;  // sixteen words of 32 bits
BATON_INLINE Words fill_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
BATON_INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
BATON_INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
BATON_INLINE Words shifted_left(Words x, int n) { return _mm512_slli_epi32(x, n); }
BATON_INLINE Vec from_int32(Words x) { return _mm512_cvtepi32_ps(x); }
BATON_INLINE Words to_int32(Vec x) { return _mm512_cvtps_epi32(x); }  // halves to even
BATON_INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
BATON_INLINE Words sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
BATON_INLINE Words bits_xor(Words a, Words b) { return _mm512_xor_si512(a, b); }
struct WidePair {
  Words high, low;
};
// The products of unsigned words, with all 64 bits.
BATON_INLINE WidePair multiply_wide(Words a, Words b) {
  const Words even = _mm512_mul_epu32(a, b);
  const Words odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  return {_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd),
          _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))};
}
BATON_INLINE Vec from_unsigned(Words x) { return _mm512_cvtepu32_ps(x); }
struct Scaled {
  Vec mantissa, exponent;
};
// Positive normal x as mantissa * 2^exponent with a mantissa in [sqrt(1/2), sqrt(2)).
BATON_INLINE Scaled split(Vec x) {
  const Words bits = _mm512_castps_si512(x);
  const Words n = _mm512_srai_epi32(_mm512_sub_epi32(bits, fill_words(kSqrtHalfBits)), 23);
  return {_mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(n, 23))),
          _mm512_cvtepi32_ps(n)};
}
BATON_INLINE Vec interleave_low(Vec a, Vec b) { return _mm512_unpacklo_ps(a, b); }
BATON_INLINE Vec interleave_high(Vec a, Vec b) { return _mm512_unpackhi_ps(a, b); }
BATON_INLINE Vec low_pairs(Vec a, Vec b) { return _mm512_shuffle_ps(a, b, 0x44); }
BATON_INLINE Vec high_pairs(Vec a, Vec b) { return _mm512_shuffle_ps(a, b, 0xEE); }

using Doubles = __m512d;  // eight fp64 numbers
BATON_INLINE Doubles fill_fp64(double x) { return _mm512_set1_pd(x); }
BATON_INLINE Doubles load_fp64(const double* p) { return _mm512_loadu_pd(p); }
BATON_INLINE void store_fp64(double* p, Doubles x) { _mm512_storeu_pd(p, x); }
BATON_INLINE Doubles widen(__m256 x) { return _mm512_cvtps_pd(x); }
BATON_INLINE Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
BATON_INLINE Doubles sub(Doubles a, Doubles b) { return _mm512_sub_pd(a, b); }
BATON_INLINE Doubles mul(Doubles a, Doubles b) { return _mm512_mul_pd(a, b); }
BATON_INLINE Doubles div(Doubles a, Doubles b) { return _mm512_div_pd(a, b); }
BATON_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
BATON_INLINE Doubles where_less(Doubles a, Doubles b, Doubles x, Doubles y) {
  return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
}
// 2^n, for a whole number n in -1022 … 1023 to which 2^52 + 2^51 was added.
BATON_INLINE Doubles exp2_shifted(Doubles x) {
  const __m512i bits = _mm512_add_epi64(_mm512_castpd_si512(x), _mm512_set1_epi64(1023));
  return _mm512_castsi512_pd(_mm512_slli_epi64(bits, 52));
}

#else

struct Vec {
  __m256 a, b;
};
BATON_INLINE Vec zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
BATON_INLINE Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BATON_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BATON_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
BATON_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
BATON_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
BATON_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
BATON_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
BATON_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
BATON_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
BATON_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
BATON_INLINE Vec abs(Vec a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.a), _mm256_andnot_ps(sign, a.b)};
}
BATON_INLINE Vec round_even(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.a, mode), _mm256_round_ps(a.b, mode)};
}
BATON_INLINE Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
BATON_INLINE __m256 exp2_whole_half(__m256 n) {
  __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
BATON_INLINE Vec exp2_whole(Vec n) { return {exp2_whole_half(n.a), exp2_whole_half(n.b)}; }
BATON_INLINE __m256 bf16_half(const uint16_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
BATON_INLINE Vec load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
BATON_INLINE Vec load_fp16_bits(__m256i raw) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(raw)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(raw, 1))};
}
BATON_INLINE Vec load_int8(const int8_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)))};
}
BATON_INLINE Vec from_bytes(__m128i raw) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8)))};
}
BATON_INLINE __m128i to_int8(Vec x) {
  __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
BATON_INLINE __m256i as_ints(__m256 x) { return _mm256_castps_si256(x); }
BATON_INLINE __m256 as_floats(__m256i x) { return _mm256_castsi256_ps(x); }
BATON_INLINE Vec bits_shifted_left(Vec x, int n) {
  return {as_floats(_mm256_slli_epi32(as_ints(x.a), n)),
          as_floats(_mm256_slli_epi32(as_ints(x.b), n))};
}
BATON_INLINE Vec bits_and(Vec x, uint32_t mask) {
  const __m256 m = as_floats(_mm256_set1_epi32(static_cast<int>(mask)));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
BATON_INLINE __m256 signed_byte_half(__m256 x, int b) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(as_ints(x), 24 - 8 * b), 24));
}
BATON_INLINE Vec signed_byte(Vec x, int b) {
  return {signed_byte_half(x.a, b), signed_byte_half(x.b, b)};
}
BATON_INLINE __m256 nibble_half(__m256 x, int shift) {
  const __m256i low = _mm256_srli_epi32(as_ints(x), shift);
  return _mm256_cvtepi32_ps(_mm256_and_si256(low, _mm256_set1_epi32(15)));
}
BATON_INLINE Vec nibble(Vec x, int shift) {
  return {nibble_half(x.a, shift), nibble_half(x.b, shift)};
}
BATON_INLINE __m256i bytes_as_words(Vec x, int b) {
  const __m256i mask = _mm256_set1_epi32(255);
  const __m256i low = _mm256_and_si256(_mm256_srli_epi32(as_ints(x.a), 8 * b), mask);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi32(as_ints(x.b), 8 * b), mask);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}
BATON_INLINE __m256 low_half(Vec x) { return x.a; }
BATON_INLINE __m256 high_half(Vec x) { return x.b; }

struct Words {
  __m256i a, b;
};
BATON_INLINE __m256i fill_words_half(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
BATON_INLINE Words fill_words(uint32_t x) { return {fill_words_half(x), fill_words_half(x)}; }
BATON_INLINE Words load_words(const void* p) {
  const __m256i* halves = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
BATON_INLINE void store_words(void* p, Words x) {
  __m256i* halves = static_cast<__m256i*>(p);
  _mm256_storeu_si256(halves, x.a);
  _mm256_storeu_si256(halves + 1, x.b);
}
BATON_INLINE Words shifted_left(Words x, int n) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
BATON_INLINE Vec from_int32(Words x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
BATON_INLINE Words to_int32(Vec x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
BATON_INLINE Words add(Words x, Words y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
BATON_INLINE Words sub(Words x, Words y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
BATON_INLINE Words bits_xor(Words x, Words y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
struct WidePair {
  Words high, low;
};
BATON_INLINE void multiply_wide_half(__m256i x, __m256i y, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(x, y);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
BATON_INLINE WidePair multiply_wide(Words x, Words y) {
  WidePair product;
  multiply_wide_half(x.a, y.a, product.high.a, product.low.a);
  multiply_wide_half(x.b, y.b, product.high.b, product.low.b);
  return product;
}
// Both 16-bit halves are exact as floats, and their sum is rounded once.
BATON_INLINE __m256 from_unsigned_half(__m256i x) {
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, fill_words_half(0xFFFF)));
  return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}
BATON_INLINE Vec from_unsigned(Words x) {
  return {from_unsigned_half(x.a), from_unsigned_half(x.b)};
}
struct Scaled {
  Vec mantissa, exponent;
};
BATON_INLINE void split_half(__m256 x, __m256& mantissa, __m256& exponent) {
  const __m256i bits = as_ints(x);
  const __m256i n = _mm256_srai_epi32(_mm256_sub_epi32(bits, fill_words_half(kSqrtHalfBits)), 23);
  mantissa = as_floats(_mm256_sub_epi32(bits, _mm256_slli_epi32(n, 23)));
  exponent = _mm256_cvtepi32_ps(n);
}
BATON_INLINE Scaled split(Vec x) {
  Scaled parts;
  split_half(x.a, parts.mantissa.a, parts.exponent.a);
  split_half(x.b, parts.mantissa.b, parts.exponent.b);
  return parts;
}
BATON_INLINE Vec interleave_low(Vec x, Vec y) {
  return {_mm256_unpacklo_ps(x.a, y.a), _mm256_unpacklo_ps(x.b, y.b)};
}
BATON_INLINE Vec interleave_high(Vec x, Vec y) {
  return {_mm256_unpackhi_ps(x.a, y.a), _mm256_unpackhi_ps(x.b, y.b)};
}
BATON_INLINE Vec low_pairs(Vec x, Vec y) {
  return {_mm256_shuffle_ps(x.a, y.a, 0x44), _mm256_shuffle_ps(x.b, y.b, 0x44)};
}
BATON_INLINE Vec high_pairs(Vec x, Vec y) {
  return {_mm256_shuffle_ps(x.a, y.a, 0xEE), _mm256_shuffle_ps(x.b, y.b, 0xEE)};
}

struct Doubles {
  __m256d a, b;
};
BATON_INLINE Doubles fill_fp64(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
BATON_INLINE Doubles load_fp64(const double* p) {
  return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)};
}
BATON_INLINE void store_fp64(double* p, Doubles x) {
  _mm256_storeu_pd(p, x.a);
  _mm256_storeu_pd(p + 4, x.b);
}
BATON_INLINE Doubles widen(__m256 x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
BATON_INLINE Doubles add(Doubles x, Doubles y) {
  return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)};
}
BATON_INLINE Doubles sub(Doubles x, Doubles y) {
  return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)};
}
BATON_INLINE Doubles mul(Doubles x, Doubles y) {
  return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)};
}
BATON_INLINE Doubles div(Doubles x, Doubles y) {
  return {_mm256_div_pd(x.a, y.a), _mm256_div_pd(x.b, y.b)};
}
BATON_INLINE Doubles fma(Doubles x, Doubles y, Doubles z) {
  return {_mm256_fmadd_pd(x.a, y.a, z.a), _mm256_fmadd_pd(x.b, y.b, z.b)};
}
BATON_INLINE Doubles where_less(Doubles a, Doubles b, Doubles x, Doubles y) {
  return {_mm256_blendv_pd(y.a, x.a, _mm256_cmp_pd(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_pd(y.b, x.b, _mm256_cmp_pd(a.b, b.b, _CMP_LT_OQ))};
}
BATON_INLINE __m256d exp2_shifted_half(__m256d x) {
  const __m256i bits = _mm256_add_epi64(_mm256_castpd_si256(x), _mm256_set1_epi64x(1023));
  return _mm256_castsi256_pd(_mm256_slli_epi64(bits, 52));
}
BATON_INLINE Doubles exp2_shifted(Doubles x) {
  return {exp2_shifted_half(x.a), exp2_shifted_half(x.b)};
}

#endif

// Returns the sum of the lanes, in one fixed order.
BATON_INLINE float sum_lanes(Vec x) {
  __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

BATON_INLINE float max_lanes(Vec x) {
  __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

BATON_INLINE float min_lanes(Vec x) {
  __m256 eight = _mm256_min_ps(low_half(x), high_half(x));
  __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(two, _mm_shuffle_ps(two, two, 1)));
}

BATON_INLINE double sum_lanes(Doubles x) {
  double lanes[8];
  store_fp64(lanes, x);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// e^x to about 2 units in the last place. Exactly 0 below -87, so masked scores have no weight.
BATON_INLINE Vec exp(Vec x) {
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

// e^x of x <= 0 to about 2 units in the last place of fp64; 0 below -700.
BATON_INLINE Doubles exp(Doubles x) {
  // 1 / 12! … 1 / 0!
  constexpr double kInverseFactorials[] = {1.0 / 479001600,
                                           1.0 / 39916800,
                                           1.0 / 3628800,
                                           1.0 / 362880,
                                           1.0 / 40320,
                                           1.0 / 5040,
                                           1.0 / 720,
                                           1.0 / 120,
                                           1.0 / 24,
                                           1.0 / 6,
                                           0.5,
                                           1.0,
                                           1.0};
  const Doubles shift = fill_fp64(0x1.8p52);  // its sum with x ends in the bits of the whole part
  const Doubles shifted = fma(x, fill_fp64(0x1.71547652b82fep0), shift);
  const Doubles n = sub(shifted, shift);
  Doubles r = fma(n, fill_fp64(-0x1.62e42fefa39efp-1), x);  // log(2) in two parts
  r = fma(n, fill_fp64(-0x1.abc9e3b39803fp-56), r);
  Doubles p = fill_fp64(1.0 / 6227020800);
  for (double coefficient : kInverseFactorials) p = fma(p, r, fill_fp64(coefficient));
  return where_less(x, fill_fp64(-700.0), fill_fp64(0.0), mul(p, exp2_shifted(shifted)));
}

// log(1 + f) + n log(2) for f in [sqrt(1/2) - 1, sqrt(2) - 1]; where n is 0, to about 3 units in
// the last place. Coefficients: Cephes' logf.
BATON_INLINE Vec log_of_parts(Vec f, Vec n) {
  Vec p = fill(7.0376836292e-2f);
  p = fma(p, f, fill(-1.1514610310e-1f));
  p = fma(p, f, fill(1.1676998740e-1f));
  p = fma(p, f, fill(-1.2420140846e-1f));
  p = fma(p, f, fill(1.4249322787e-1f));
  p = fma(p, f, fill(-1.6668057665e-1f));
  p = fma(p, f, fill(2.0000714765e-1f));
  p = fma(p, f, fill(-2.4999993993e-1f));
  p = fma(p, f, fill(3.3333331174e-1f));
  const Vec square = mul(f, f);
  Vec y = mul(mul(square, f), p);
  y = fma(n, fill(-2.12194440e-4f), y);
  y = fma(square, fill(-0.5f), y);
  return fma(n, fill(0.693359375f), add(f, y));
}

BATON_INLINE Vec tanh(Vec x) {  // 1 - 2 / (1 + e^2x)
  Vec e = exp(add(x, x));
  return sub(fill(1.0f), div(fill(2.0f), add(fill(1.0f), e)));
}

// Within each four lanes, rows become columns: lane 4 i + j of x[r] goes to lane 4 i + r of x[j].
BATON_INLINE void transpose_fours(Vec (&x)[4]) {
  const Vec low01 = interleave_low(x[0], x[1]), high01 = interleave_high(x[0], x[1]);
  const Vec low23 = interleave_low(x[2], x[3]), high23 = interleave_high(x[2], x[3]);
  x[0] = low_pairs(low01, low23);
  x[1] = high_pairs(low01, low23);
  x[2] = low_pairs(high01, high23);
  x[3] = high_pairs(high01, high23);
}

#if BATON_AVX512

// The second half of a transposition of 16 x 16 words. quads[g] are rows 4 g … 4 g + 3 after
// transpose_fours. columns[j] becomes column 4 j + c.
BATON_INLINE void join_fours(const Vec (&quads)[4][4], int c, Vec (&columns)[4]) {
  const Vec even01 = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], 0x88);
  const Vec even23 = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], 0x88);
  const Vec odd01 = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], 0xDD);
  const Vec odd23 = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], 0xDD);
  columns[0] = _mm512_shuffle_f32x4(even01, even23, 0x88);
  columns[1] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
  columns[2] = _mm512_shuffle_f32x4(even01, even23, 0xDD);
  columns[3] = _mm512_shuffle_f32x4(odd01, odd23, 0xDD);
}

// Transposes 16 x 16 words; row i begins `offset` bytes after rows[i].
BATON_INLINE void transpose(const uint8_t* const* rows, size_t offset, Vec* columns) {
  Vec quads[4][4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      quads[g][i] = load(reinterpret_cast<const float*>(rows[4 * g + i] + offset));
    transpose_fours(quads[g]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    Vec four[4];
    join_fours(quads, c, four);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) columns[4 * j + c] = four[j];
  }
}

#else

BATON_INLINE void transpose8(const uint8_t* const* rows, size_t offset, __m256* columns) {
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
    columns[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    columns[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}

BATON_INLINE void transpose(const uint8_t* const* rows, size_t offset, Vec* columns) {
  __m256 first[8], second[8];
  for (int j = 0; j < kLanes; j += 8) {
    transpose8(rows, offset + 4 * j, first);
    transpose8(rows + 8, offset + 4 * j, second);
    for (int i = 0; i < 8; ++i) columns[j + i] = {first[i], second[i]};
  }
}

#endif

BATON_INLINE float bf16_to_float(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

BATON_INLINE uint16_t float_to_bf16(float x) {  // halves to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace baton
