// Products of 16-bit numbers and bytes, as whole numbers: attention over int8 KV.
//
// Rows of numbers (queries, or weights of tokens) are multiplied by a panel of signed bytes (K or
// V), whose layout is that of weights: [cols / 4][kPanel][4]. Every sum is exact, so its bits do
// not depend on the way of computing it. AVX2 multiplies 16-bit numbers; AVX-512 and AMX multiply
// the numbers' lower and upper bytes. There is different code for few rows and for many rows: see
// below.
#pragma once

#include "gemm.h"
#include "kv.h"

namespace baton {

constexpr float kWholeMost = 127 * 256;               // the largest number
constexpr float kWholeLeast = 1e-30f;                 // rows without larger elements count as zero
constexpr int kWholeMaxCols = 512;                    // with more inputs, sums could exceed 32 bits
constexpr int kWholeRows = BATON_AVX512 ? 7 : 4;      // of a block
constexpr int kWholeZero = BATON_AVX512 ? 32768 : 0;  // added to numbers that may be negative

// The bytes of one packed block.
inline size_t whole_bytes(int cols) {
  return static_cast<size_t>(2 * kWholeRows) * round_up(cols, kGroupBytes);
}

// Packs row r of `rows` for whole_product: the numbers round(x * inverse) + zero, for `cols`
// elements or slightly more. The memory of x must consist of whole vectors.
inline void pack_whole(const float* x, float inverse, int zero, int cols, int r, int rows,
                       uint8_t* to) {
#if BATON_AVX512
  const Vec factor = fill(inverse);
  const Words start = fill_words(static_cast<uint32_t>(zero));
  const auto numbers = [&](int i) {
    return _mm512_cvtepi32_epi16(add(to_int32(mul(load(x + i), factor)), start));
  };
  const auto both = [&](int i) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(numbers(i)), numbers(i + kLanes), 1);
  };
  const auto low = [](__m512i words) { return _mm512_cvtepi16_epi8(words); };
  const auto high = [](__m512i words) { return _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)); };
  alignas(32) uint8_t lows[32], highs[32];
  for (int i = 0; i < cols; i += 32) {
    const __m512i words = both(i);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lows), low(words));
    _mm256_store_si256(reinterpret_cast<__m256i*>(highs), high(words));
    for (int j = 0; j < std::min(32, cols - i); j += 4, to += 8 * rows) {
      std::memcpy(to + 4 * r, lows + j, 4);
      std::memcpy(to + 4 * (rows + r), highs + j, 4);
    }
  }
#else
  alignas(64) int32_t whole[kLanes];
  for (int i = 0; i < cols; i += kLanes) {
    store_words(whole, to_int32(mul(load(x + i), fill(inverse))));
    for (int& number : whole) number += zero;
    for (int j = 0; j < std::min(kLanes, cols - i); j += 4, to += 8 * rows) {
      const int order[4] = {whole[j], whole[j + 2], whole[j + 1], whole[j + 3]};
      int16_t pairs[4];
      for (int n = 0; n < 4; ++n) pairs[n] = static_cast<int16_t>(order[n]);
      std::memcpy(to + 8 * r, pairs, 8);
    }
  }
#endif
}

#if !BATON_AVX512

template <int R>
inline void tile_whole(const uint8_t* a, const int8_t* panel, int cols, int32_t* c) {
  __m256i acc[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int k = 0; k < cols; k += 4, a += 8 * R) {
    const int8_t* p = panel + static_cast<size_t>(k) * kPanel;
    __m256i even[2], odd[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * v));
      even[v] = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
      odd[v] = _mm256_srai_epi16(w, 8);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int32_t pairs[2];
      std::memcpy(pairs, a + 8 * r, 8);
      const __m256i x = _mm256_set1_epi32(pairs[0]), y = _mm256_set1_epi32(pairs[1]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(even[v], x));
        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(odd[v], y));
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(c + r * kPanel + v * 8), acc[r][v]);
}

#endif

// Multiplies a packed block of `rows` rows by a panel and calls consume(row, vector of the panel,
// sums) for each.
template <class Consume>
inline void whole_product(const uint8_t* a, int rows, const int8_t* panel, int cols,
                          Consume consume) {
  alignas(64) int32_t sums[2 * kWholeRows * kPanel];
#if BATON_AVX512
  with_rows<kWholeRows>(rows, [&](auto r) { tile_int8<2 * r()>(a, panel, cols, Nothing{}, sums); });
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kPanelVecs; ++v) {
      const int32_t* low = sums + r * kPanel + v * kLanes;
      const Words high = shifted_left(load_words(low + rows * kPanel), 8);
      consume(r, v, add(load_words(low), high));
    }
#else
  with_rows<kWholeRows>(rows, [&](auto r) { tile_whole<r()>(a, panel, cols, sums); });
  for (int r = 0; r < rows; ++r) consume(r, 0, load_words(sums + r * kPanel));
#endif
}

// Writes sixteen elements of each of four tokens as [16][4].
BATON_INLINE void interleave(const uint8_t* const* tokens, size_t at, int8_t* to) {
  __m128i x[4];
  for (int t = 0; t < 4; ++t)
    x[t] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tokens[t] + at));
#if BATON_AVX512 && defined(__AVX512VBMI__)
  const __m512i order = _mm512_set_epi8(
      63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58, 42, 26,
      10, 57, 41, 25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20, 4,
      51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
  __m512i all = _mm512_castsi128_si512(x[0]);
  all = _mm512_inserti32x4(all, x[1], 1);
  all = _mm512_inserti32x4(all, x[2], 2);
  all = _mm512_inserti32x4(all, x[3], 3);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi8(order, all));
#else
  const __m128i low01 = _mm_unpacklo_epi8(x[0], x[1]), high01 = _mm_unpackhi_epi8(x[0], x[1]);
  const __m128i low23 = _mm_unpacklo_epi8(x[2], x[3]), high23 = _mm_unpackhi_epi8(x[2], x[3]);
  __m128i* out = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(out, _mm_unpacklo_epi16(low01, low23));
  _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
  _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
  _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
#endif
}

#if BATON_AVX512

// For few rows, K and V go straight from the record to products in registers. A block's tokens are
// consecutive there, in groups of sixteen. Each row of numbers is an array of the lower bytes, then
// an array of the upper bytes. The functions are not inlined, because compilers keep fewer sums in
// registers in a large function.

BATON_INLINE void store_low_bytes(uint8_t* to, Words x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}

// Broadcasts four bytes of row r % R: lower bytes if r < R, otherwise upper bytes.
template <int R>
BATON_INLINE Words four_bytes(const uint8_t* rows, int cols, int r, int at) {
  int32_t four;
  std::memcpy(&four, rows + static_cast<size_t>(r < R ? 2 * r : 2 * (r - R) + 1) * cols + at, 4);
  return _mm512_set1_epi32(four);
}

constexpr int kKeyZero = 128;  // added to bytes of K, since vpdpbusd wants one factor unsigned

// Rounds a query x [cols] to numbers of two signed bytes. The upper bytes are `apart` bytes after
// the lower bytes. Returns the number that undoes kKeyZero.
inline int32_t pack_query(const float* x, float inverse, int cols, int apart, uint8_t* to) {
  Words sum = fill_words(0);
  for (int i = 0; i < cols; i += kLanes) {
    const Words number = to_int32(mul(load(x + i), fill(inverse)));
    sum = add(sum, number);
    store_low_bytes(to + i, number);
    store_low_bytes(to + apart + i, _mm512_srli_epi32(add(number, fill_words(128)), 8));
  }
  return -kKeyZero * _mm512_reduce_add_epi32(sum);
}

// Computes the products of R queries with K [16, cols]; cols is a multiple of kGroupBytes.
// Prefetches the lines of `next` meanwhile.
template <int R, class Next>
__attribute__((noinline)) void few_scores(const uint8_t* queries, const int32_t* offsets,
                                          const uint8_t* tokens, int cols, Words* products,
                                          const Next& next) {
  const Words zero = _mm512_set1_epi8(static_cast<char>(kKeyZero));
  Words sums[2 * R];
#pragma GCC unroll 7
  for (int r = 0; r < R; ++r) {
    sums[r] = _mm512_set1_epi32(offsets[r]);
    sums[R + r] = fill_words(0);
  }
  for (int first = 0; first < cols; first += kGroupBytes) {
    Vec quads[4][4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint8_t* token = tokens + static_cast<size_t>(4 * g + i) * cols + first;
        quads[g][i] = _mm512_castsi512_ps(bits_xor(load_words(token), zero));
      }
      transpose_fours(quads[g]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {  // between the shuffles, because other units multiply
      Vec columns[4];
      join_fours(quads, c, columns);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Words keys = _mm512_castps_si512(columns[j]);
        next.request(first / kWord + 4 * c + j);
#pragma GCC unroll 14
        for (int r = 0; r < 2 * R; ++r)
          sums[r] = _mm512_dpbusd_epi32(
              sums[r], keys, four_bytes<R>(queries, cols, r, first + (4 * j + c) * kWord));
      }
    }
  }
#pragma GCC unroll 7
  for (int r = 0; r < R; ++r) products[r] = add(sums[r], shifted_left(sums[R + r], 8));
}

// Reorders the sums of 64 dimensions that few_values computes: vector j has 16 L + 4 j … 16 L + 4 j
// + 3 in its L-th quarter. Two calls restore the order.
BATON_INLINE void exchange_quarters(float* sums) {
  const Vec a = load(sums), b = load(sums + 16), c = load(sums + 32), d = load(sums + 48);
  const Vec even_low = _mm512_shuffle_f32x4(a, b, 0x88),
            even_high = _mm512_shuffle_f32x4(c, d, 0x88);
  const Vec odd_low = _mm512_shuffle_f32x4(a, b, 0xDD), odd_high = _mm512_shuffle_f32x4(c, d, 0xDD);
  store(sums, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
  store(sums + 16, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
  store(sums + 32, _mm512_shuffle_f32x4(even_low, even_high, 0xDD));
  store(sums + 48, _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD));
}

// sums [R, padded] = fades [R] * sums + weights [R, 16 * groups] times V, for 64 dimensions from
// `first` on. `steps` is the unit of each row of weights; rows are `apart` bytes apart. Prefetches
// an equal part of V at `next`.
template <int R>
__attribute__((noinline)) void few_values(const uint8_t* weights, const float* steps,
                                          const float* fades, const uint8_t* const* tokens,
                                          const uint8_t* const* next, int apart, int groups,
                                          int cols, int first, float* to, int padded) {
  constexpr int kVecs = R <= 2 ? 4 : 2;  // vectors whose sums stay in registers
#pragma GCC unroll 2
  for (int half = 0; half < 4; half += kVecs) {
    Words sums[2 * R][kVecs];
#pragma GCC unroll 14
    for (int r = 0; r < 2 * R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = fill_words(0);
    for (int g = 0; g < groups; ++g) {
      const uint8_t* at = tokens[g] + first;
      const char* ahead = reinterpret_cast<const char*>(next[g]) + (first + half * kLanes) * kLanes;
      for (int t = 0; t < kLanes; t += 4, at += 4 * cols, ahead += kVecs * 64) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) _mm_prefetch(ahead + v * 64, _MM_HINT_T1);
        const __m512i x0 = _mm512_loadu_si512(at), x1 = _mm512_loadu_si512(at + cols);
        const __m512i x2 = _mm512_loadu_si512(at + 2 * cols);
        const __m512i x3 = _mm512_loadu_si512(at + 3 * cols);
        __m512i values[4];
        if (half == 0) {
          const __m512i a01 = _mm512_unpacklo_epi8(x0, x1), a23 = _mm512_unpacklo_epi8(x2, x3);
          values[0] = _mm512_unpacklo_epi16(a01, a23);
          values[1] = _mm512_unpackhi_epi16(a01, a23);
        }
        if (half + kVecs == 4) {
          const __m512i a01 = _mm512_unpackhi_epi8(x0, x1), a23 = _mm512_unpackhi_epi8(x2, x3);
          values[kVecs - 2] = _mm512_unpacklo_epi16(a01, a23);
          values[kVecs - 1] = _mm512_unpackhi_epi16(a01, a23);
        }
#pragma GCC unroll 14
        for (int r = 0; r < 2 * R; ++r) {
          const Words x = four_bytes<R>(weights, apart, r, g * kLanes + t);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v)
            sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], x, values[v]);
        }
      }
    }
#pragma GCC unroll 7
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        float* y = to + static_cast<size_t>(r) * padded + first + (half + v) * kLanes;
        const Words sum = add(sums[r][v], shifted_left(sums[R + r][v], 8));
        store(y, fma(from_int32(sum), fill(steps[r]), mul(load(y), fill(fades[r]))));
      }
  }
}

#endif

#if BATON_AMX

// For many rows, sixteen queries are the lanes of a vector, so that no operation sums or compares
// across lanes.

constexpr int kManyBytes = 2 * kLanes * kWord;  // lower and upper bytes of sixteen queries' words

struct alignas(64) SixteenQueries {
  float steps[kLanes];      // the unit of each query's numbers
  int32_t offsets[kLanes];  // see pack_query
  int32_t ends[kLanes];     // the last token that each query attends to, plus one
  float peaks[kLanes], totals[kLanes];
};

// The weights of a tile's tokens for sixteen queries.
template <int kTokens>
struct alignas(64) SixteenWeights {
  uint8_t numbers[kLanes][2 * kTokens];  // lower bytes, then upper bytes
  float steps[kLanes];                   // the unit of the numbers
  float fades[kLanes];                   // factors of the sums so far
};

// Makes a panel from queries in the form of pack_query [16, 2, cols]: [cols / 4][2][16][4].
inline void pack_sixteen(const uint8_t* queries, int cols, uint8_t* panel) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* rows[kLanes];
    for (int r = 0; r < kLanes; ++r) rows[r] = queries + (2 * r + half) * static_cast<size_t>(cols);
    for (int first = 0; first < cols; first += kGroupBytes) {
      Vec columns[kLanes];
      transpose(rows, first, columns);
      uint8_t* to = panel + static_cast<size_t>(first / kWord) * kManyBytes + half * kGroupBytes;
      for (int c = 0; c < kLanes; ++c, to += kManyBytes)
        store(reinterpret_cast<float*>(to), columns[c]);
    }
  }
}

// Packs weights [kTokens][16] of sixteen queries.
template <int kTokens>
inline void pack_weights(const float* weights, Vec inverse, uint8_t* numbers) {
  static_assert(2 * kTokens == kGroupBytes);
  alignas(64) uint8_t words[kLanes][kGroupBytes];
  const uint8_t* rows[kLanes];
  // Bytes 0 and 2 of each word, of both vectors.
  const Words lower = _mm512_add_epi8(
      _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                         fill_words(0x04040404)),
      fill_words(0x42400200));
  const Words upper = _mm512_add_epi8(lower, fill_words(0x01010101));
  const auto pair = [&](const float* at) {
    const Words first = to_int32(mul(load(at), inverse));
    return _mm512_or_si512(first, shifted_left(to_int32(mul(load(at + kLanes), inverse)), 16));
  };
#pragma GCC unroll 2
  for (int four = 0; four < kTokens / 4; ++four, weights += 4 * kLanes) {
    const Words early = pair(weights), late = pair(weights + 2 * kLanes);
    store_words(words[four], _mm512_permutex2var_epi8(early, lower, late));
    store_words(words[kTokens / 4 + four], _mm512_permutex2var_epi8(early, upper, late));
  }
  for (int r = 0; r < kLanes; ++r) rows[r] = words[r];
  Vec columns[kLanes];
  transpose(rows, 0, columns);
#pragma GCC unroll 16
  for (int q = 0; q < kLanes; ++q)
    store(reinterpret_cast<float*>(numbers + q * kGroupBytes), columns[q]);
}

#endif

// Returns sums plus the four signed bytes of each word.
BATON_INLINE Words add_bytes(Words sums, Vec words) {
#if BATON_AVX512
  return _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_castps_si512(words));
#else
  (void)words;
  return sums;  // not needed: kWholeZero is zero
#endif
}

}  // namespace baton
