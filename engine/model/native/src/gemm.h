// Linear layers over weights that are packed once, in panels of kPanel output columns.
//
//     fp32, bf16   [num_panels][cols][kPanel]
//     int8         [num_panels][cols / 4][kPanel][4], one scale per output column
//
// Activations are fp32, or for int8 weights bytes with one scale per row (absolute maximum / 127).
// A tile of at most kMaxRows rows and one panel stays in registers while the whole of `cols` passes
// by, so an element of the result is one chain of fused additions in the order of `cols` (fp32) or
// an exact integer (int8): its bits do not depend on how many rows there are, nor on which.
//
// Weights that a checkpoint holds in bf16 are kept so and widened in registers: the same products
// as with fp32 weights, from half the memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"
#include "team.h"

namespace baton {

enum Kind : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2 };

#if BATON_AVX512
constexpr int kPanelVecs = 2;
constexpr int kMaxRows = 14;
constexpr int kMaxRowsInt8 = 14;
#else
constexpr int kPanelVecs = 1;
constexpr int kMaxRows = 6;
constexpr int kMaxRowsInt8 = 4;
#endif
constexpr int kPanel = kPanelVecs * kLanes;
constexpr int kChunkBytes = 512 * 1024;  // activations that stay in a core's L2 cache
constexpr int kWidenFromRows = 2 * kMaxRows;  // from here on a bf16 panel is widened once for all
constexpr int kPrefetchBytes = 2048;

// A packed matrix [rows, cols]; mirrored in library.py.
struct Weight {
  int32_t kind;
  int32_t rows;  // outputs
  int32_t cols;  // inputs
  int32_t padded_cols;
  const void* panels;
  const float* scales;     // int8: [num_panels * kPanel]
  const int32_t* offsets;  // int8: what a sum of byte products starts from: undoes kByteZero
  const float* bias;       // [num_panels * kPanel] or null

  int num_panels() const { return (rows + kPanel - 1) / kPanel; }
};

// Activations of `rows` rows, packed so that the kernels read them from front to back: blocks of up
// to max_rows rows, each [cols][rows of the block] for fp32 and bf16 weights (`values`), for int8
// [cols / 4][rows of the block][4] (`bytes`, with one of `scales` for each row).
struct Rows {
  float* values;
  uint8_t* bytes;
  float* scales;
};

inline int max_rows(const Weight& w) { return w.kind == kInt8 ? kMaxRowsInt8 : kMaxRows; }
inline int num_blocks(const Weight& w, int rows) { return (rows + max_rows(w) - 1) / max_rows(w); }

// c [R, kPanel] = or += a [R, cols] times a panel; a's element (r, k) is a[r * step_r + k * step_k].
template <int R, class Load>
inline void tile_float(const float* a, size_t step_r, size_t step_k, Load weights, int cols,
                       float* c, size_t ldc, bool accumulate) {
  Vec acc[R][kPanelVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v)
      acc[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zeros();
  for (int k = 0; k < cols; ++k) {
    Vec w[kPanelVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) w[v] = weights(k, v);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec x = fill(a[r * step_r]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVecs; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
    }
    a += step_k;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

struct LoadFloat {
  const float* panel;
  size_t ld;
  Vec operator()(int k, int v) const {
    const float* p = panel + k * ld + v * kLanes;
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
    return load(p);
  }
};

struct LoadBf16 {
  const uint16_t* panel;
  Vec operator()(int k, int v) const {
    const uint16_t* p = panel + k * kPanel + v * kLanes;
    if (v == 0) _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
    return load_bf16(p);
  }
};

#if BATON_AVX512

template <int R>
inline void tile_int8(const uint8_t* a, const int8_t* panel, int cols,
                      const int32_t* offsets, int32_t* c) {
  __m512i acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = _mm512_loadu_si512(offsets);
    acc[r][1] = _mm512_loadu_si512(offsets + kLanes);
  }
  for (int k = 0; k < cols; k += 4) {
    const int8_t* p = panel + static_cast<size_t>(k) * kPanel;
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + 64, _MM_HINT_T0);
    __m512i w0 = _mm512_loadu_si512(p), w1 = _mm512_loadu_si512(p + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, a + k * R + r * 4, 4);
      __m512i x = _mm512_set1_epi32(four);
      acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], x, w0);
      acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], x, w1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_si512(c + r * kPanel, acc[r][0]);
    _mm512_storeu_si512(c + r * kPanel + kLanes, acc[r][1]);
  }
}
constexpr int kByteZero = 128;  // activations are stored with this added: vpdpbusd wants them unsigned

#else

// |x| * sign(x) w: products of signed bytes whose pairwise sums cannot overflow 16 bits.
template <int R>
inline void tile_int8(const uint8_t* a, const int8_t* panel, int cols,
                      const int32_t*, int32_t* c) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int k = 0; k < cols; k += 4) {
    const int8_t* p = panel + static_cast<size_t>(k) * kPanel;
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
    __m256i w[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, a + k * R + r * 4, 4);
      __m256i x = _mm256_set1_epi32(four), size = _mm256_abs_epi8(x);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w[v], x));
        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(c + r * kPanel + v * 8), acc[r][v]);
}
constexpr int kByteZero = 0;

#endif

// Calls f<R>() for R = rows, which is between 1 and Max.
template <int Max, class F>
inline void with_rows(int rows, F f) {
  if constexpr (Max >= 1) {
    if (rows == Max) f(std::integral_constant<int, Max>{});
    else with_rows<Max - 1>(rows, f);
  }
}

// The same for a whose rows lie `lda` apart, and fp32 weights `ldw` apart.
inline void multiply_float(const float* a, size_t lda, int rows, const float* panel, size_t ldw,
                           int cols, float* c, size_t ldc, bool accumulate) {
  with_rows<kMaxRows>(rows, [&](auto r) {
    tile_float<r()>(a, lda, 1, LoadFloat{panel, ldw}, cols, c, ldc, accumulate);
  });
}

// Block `first` … `first + rows - 1` of x times one panel of w, into tile [rows, kPanel]. `wide`: the
// panel in fp32.
inline void multiply_panel(const Weight& w, int panel, const float* wide, const Rows& x, int first,
                           int rows, float* tile) {
  const size_t at = static_cast<size_t>(panel) * kPanel * w.padded_cols;
  const size_t block = static_cast<size_t>(first) * w.padded_cols;
  if (w.kind == kInt8) {
    alignas(64) int32_t sums[kMaxRowsInt8 * kPanel];
    const int8_t* bytes = static_cast<const int8_t*>(w.panels) + at;
    const int column = panel * kPanel;
    with_rows<kMaxRowsInt8>(rows, [&](auto r) {
      tile_int8<r()>(x.bytes + block, bytes, w.padded_cols, w.offsets + column, sums);
    });
    for (int r = 0; r < rows; ++r) {
      const Vec row_scale = fill(x.scales[first + r]);
      for (int v = 0; v < kPanelVecs; ++v) {
        const Vec exact = from_int32(sums + r * kPanel + v * kLanes);
        const Vec y = mul(mul(exact, load(w.scales + column + v * kLanes)), row_scale);
        store(tile + r * kPanel + v * kLanes, y);
      }
    }
    return;
  }
  const float* a = x.values + block;
  if (wide == nullptr && w.kind == kBf16) {
    const uint16_t* narrow = static_cast<const uint16_t*>(w.panels) + at;
    with_rows<kMaxRows>(rows, [&](auto r) {
      tile_float<r()>(a, 1, r(), LoadBf16{narrow}, w.cols, tile, kPanel, false);
    });
    return;
  }
  if (wide == nullptr) wide = static_cast<const float*>(w.panels) + at;
  with_rows<kMaxRows>(rows, [&](auto r) {
    tile_float<r()>(a, 1, r(), LoadFloat{wide, kPanel}, w.cols, tile, kPanel, false);
  });
}

// What a thread needs beside its arguments: panels in fp32.
inline size_t widened_floats(const Weight& w, int panels) {
  return w.kind == kBf16 ? static_cast<size_t>(w.cols) * kPanel * panels : 0;
}

// Computes x @ w^T for panels share.begin … share.end - 1 of `num_weights` matrices of one shape and
// calls, for each tile, consume(first row, number of rows, panel, tiles): tiles are kWeights times
// [number of rows, kPanel], kMaxRows * kPanel apart, of the same panel of each matrix.
template <int kWeights, class Consume>
inline void linear_tiles(const Weight* const* weights, const Rows& x, int rows, Share share,
                         float* widened, Consume consume) {
  const Weight& w = *weights[0];
  const size_t row_bytes = static_cast<size_t>(w.padded_cols) * (w.kind == kInt8 ? 1 : 4);
  const int blocks = num_blocks(w, rows);
  const int chunk_blocks = std::max<int>(2, kChunkBytes / (row_bytes * max_rows(w)));
  const size_t panel_floats = static_cast<size_t>(w.cols) * kPanel;
  const bool widen = w.kind == kBf16 && rows >= kWidenFromRows;
  alignas(64) float tiles[kWeights * kMaxRows * kPanel];
  for (int chunk = 0; chunk < blocks; chunk += chunk_blocks) {
    const int chunk_end = std::min(blocks, chunk + chunk_blocks);
    for (int panel = share.begin; panel < share.end; ++panel) {
      for (int i = 0; widen && i < kWeights; ++i) {
        const uint16_t* narrow =
            static_cast<const uint16_t*>(weights[i]->panels) + panel * panel_floats;
        for (size_t j = 0; j < panel_floats; j += kLanes)
          store(widened + i * panel_floats + j, load_bf16(narrow + j));
      }
      for (int block = chunk; block < chunk_end; ++block) {
        const Share part(rows, block, blocks);
        const int count = part.end - part.begin;
        for (int i = 0; i < kWeights; ++i)
          multiply_panel(*weights[i], panel, widen ? widened + i * panel_floats : nullptr, x,
                         part.begin, count, tiles + i * kMaxRows * kPanel);
        consume(part.begin, count, panel, tiles);
      }
    }
  }
}

// The same of one matrix, this thread's share of its panels.
template <class Consume>
inline void linear_tiles(const Weight& w, const Rows& x, int rows, int thread, int threads,
                         float* widened, Consume consume) {
  const Weight* weights[] = {&w};
  linear_tiles<1>(weights, x, rows, Share(w.num_panels(), thread, threads), widened, consume);
}

// Columns of a panel that exist: the last may be padded.
inline int panel_columns(const Weight& w, int panel) {
  return std::min(kPanel, w.rows - panel * kPanel);
}

// Packs row `row` of `rows`, x [cols], as what `w` multiplies.
inline void pack_row(const Weight& w, const float* x, int row, int rows, const Rows& to) {
  const int blocks = num_blocks(w, rows);
  const int index = static_cast<int>((static_cast<int64_t>(row + 1) * blocks - 1) / rows);
  const Share block(rows, index, blocks);
  const size_t step = block.end - block.begin;
  const size_t start = static_cast<size_t>(block.begin) * w.padded_cols;
  if (w.kind != kInt8) {
    float* y = to.values + start + (row - block.begin);
    if (step == 1) std::memcpy(y, x, sizeof(float) * w.cols);
    else for (int i = 0; i < w.cols; ++i) y[i * step] = x[i];
    return;
  }
  Vec most = zeros();
  int i = 0;
  for (; i + kLanes <= w.cols; i += kLanes) most = max(most, abs(load(x + i)));
  float largest = max_lanes(most);
  for (; i < w.cols; ++i) largest = std::max(largest, std::fabs(x[i]));
  to.scales[row] = largest / 127.0f;
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  uint8_t* y = to.bytes + start + (row - block.begin) * 4;
  alignas(16) int8_t whole[kLanes];
  for (i = 0; i < w.padded_cols; i += kLanes) {
    if (i + kLanes <= w.cols) {
      store_int8(whole, round_even(mul(load(x + i), fill(inverse))));
    } else {
      for (int j = 0; j < kLanes; ++j)
        whole[j] = i + j < w.cols ? static_cast<int8_t>(std::nearbyintf(x[i + j] * inverse)) : 0;
    }
    for (int j = 0; j < kLanes; ++j) whole[j] = static_cast<int8_t>(whole[j] + kByteZero);
    for (int j = 0; j < kLanes && i + j < w.padded_cols; j += 4)
      std::memcpy(y + (i + j) * step, whole + j, 4);
  }
}

inline int padded_cols(int kind, int cols) { return kind == kInt8 ? (cols + 3) / 4 * 4 : cols; }

inline size_t packed_bytes(int kind, int rows, int cols) {
  const size_t elements =
      static_cast<size_t>((rows + kPanel - 1) / kPanel) * kPanel * padded_cols(kind, cols);
  return elements * (kind == kFp32 ? 4 : kind == kBf16 ? 2 : 1);
}

// Packs `source` [rows, cols] fp32; scales and offsets [num_panels * kPanel] are written for int8.
inline void pack(int kind, const float* source, int rows, int cols, void* panels, float* scales,
                 int32_t* offsets) {
  const int padded = padded_cols(kind, cols);
  const int num_panels = (rows + kPanel - 1) / kPanel;
  for (int row = 0; row < num_panels * kPanel; ++row) {
    const float* x = row < rows ? source + static_cast<size_t>(row) * cols : nullptr;
    const size_t panel = static_cast<size_t>(row / kPanel) * kPanel * padded;
    const int column = row % kPanel;
    float largest = 0;
    for (int k = 0; x && k < cols; ++k) largest = std::max(largest, std::fabs(x[k]));
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int k = 0; k < padded; ++k) {
      const float value = x && k < cols ? x[k] : 0.0f;
      if (kind == kInt8) {
        const int8_t q = static_cast<int8_t>(std::nearbyintf(value * inverse));
        const size_t at = panel + (static_cast<size_t>(k / 4) * kPanel + column) * 4 + k % 4;
        static_cast<int8_t*>(panels)[at] = q;
        sum += q;
      } else {
        const size_t at = panel + static_cast<size_t>(k) * kPanel + column;
        if (kind == kBf16) static_cast<uint16_t*>(panels)[at] = float_to_bf16(value);
        else static_cast<float*>(panels)[at] = value;
      }
    }
    if (kind == kInt8) {
      scales[row] = largest / 127.0f;
      offsets[row] = -kByteZero * sum;
    }
  }
}

}  // namespace baton
