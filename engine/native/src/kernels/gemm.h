// Linear layers over weights that are packed once, in panels of kPanel output columns.
//
//     fp32, bf16      [num_panels][cols][kPanel]
//     bf16 in pairs   [num_panels][cols / 2][kPanel][2], to be multiplied with AMX
//     int8            [num_panels][cols / 4][kPanel][4], one scale per output column
//     int8 as float   the same weights with fp32 activations: slow, but activations are not rounded,
//                     so that two ways to compute a model can be compared
//
// Activations are fp32, or for int8 bytes with one scale per row (absolute maximum / 127).
// A tile of at most kMaxRows rows and one panel stays in registers for all of `cols`. So an element
// of the result is one chain of fused additions in the order of `cols` (fp32), three of AMX's own, or
// an exact integer (int8). Its bits depend neither on the number of rows nor on their order.
//
// Weights that are bf16 in the checkpoint stay bf16 and are widened when they are read. The products
// are the same as with fp32 weights, from half the memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "team.h"

namespace baton {

enum Kind : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt8AsFloat = 3, kBf16Pairs = 4 };

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
constexpr int kChunkBytes = 512 * 1024;  // bytes of activations that stay in a core's L2 cache
constexpr int kWidenFromRows =
    2 * kMaxRows;  // from this number of rows on, a bf16 panel is widened once for all rows
constexpr int kPrefetchBytes = 2048;
constexpr int kAheadFromRows = 3;  // with fewer rows, reading takes less time than multiplying
constexpr int kMaxColumns = 512;   // columns of one chunk, if all activations exceed kChunkBytes
constexpr int kWaitingPanels = 8;  // panels whose sums wait for further columns
constexpr int kPackColumns = 128;
constexpr int kAmxFromRows = 4;        // with fewer rows, products are faster without AMX
constexpr int kBlockRows = kAmxBlock;  // most rows of a block
static_assert(kBlockRows >= kMaxRows && kBlockRows >= kMaxRowsInt8);

// A packed matrix [rows, cols]; mirrored in structs.py.
struct Weight {
  int32_t kind;
  int32_t rows;  // outputs
  int32_t cols;  // inputs
  int32_t padded_cols;
  const void* panels;
  const float* scales;     // int8: [num_panels * kPanel]
  const int32_t* offsets;  // int8: added to a sum of byte products; undoes kByteZero
  const float* bias;       // [num_panels * kPanel] or null

  int num_panels() const { return (rows + kPanel - 1) / kPanel; }
};

// Activations of `rows` rows, packed in the order in which the kernels read them. They are in
// blocks of rows. A block is [cols][rows of the block] for fp32 and bf16 weights (`values`). For
// int8 it is [cols / 4][rows of the block][4], or with AMX [rows / 16][cols / 64][16][64] (`bytes`,
// with a scale for each row). For bf16 in pairs it is [rows / 5][cols / 32][16][32] numbers of
// bf16, also in `bytes`: three rows of bf16 for each row, and one unused row.
struct Rows {
  float* values;
  uint8_t* bytes;
  float* scales;
};

// The division of a product's rows into blocks.
struct RowBlocks {
  int rows;
  int most;  // largest number of rows in a block
  int count;
  bool amx;

  RowBlocks(const Weight& w, int rows)
      : rows(rows),
        amx(w.kind == kBf16Pairs || (w.kind == kInt8 && amx_is_used && rows >= kAmxFromRows &&
                                     w.padded_cols % kAmxInputs == 0)) {
    if (amx) most = w.kind == kInt8 ? kAmxBlock : kFloatBlock;
    else most = w.kind == kInt8 ? kMaxRowsInt8 : kMaxRows;
    count = (rows + most - 1) / most;
  }
  Share operator[](int block) const {
    Share share(rows, block, count);
    if (amx) share.begin = block * most, share.end = std::min(rows, share.begin + most);
    return share;
  }
  Share of_row(int row) const {
    if (amx) return (*this)[row / most];
    return (*this)[static_cast<int>((static_cast<int64_t>(row + 1) * count - 1) / rows)];
  }
};

// Prefetches a part of the next panel into the L2 cache. Each block of rows requests an equal part,
// so that memory is read at an even rate.
struct Ahead {
  const char* first;
  int step;  // bytes

  // The next panel, `next`, is read in steps of `step_bytes`.
  Ahead(const void* next, int steps, int step_bytes, int block, int blocks)
      : step((step_bytes + blocks - 1) / blocks) {
    first = static_cast<const char*>(next) + static_cast<size_t>(steps) * step * block;
  }
  BATON_INLINE void request(int i) const {  // at most 128 bytes
    const char* at = first + static_cast<size_t>(i) * step;
    _mm_prefetch(at, _MM_HINT_T1);
    if (step > 64) _mm_prefetch(at + 64, _MM_HINT_T1);
  }
  BATON_INLINE void request_lines(int i) const {
    const char* at = first + static_cast<size_t>(i) * step;
    for (int line = 0; line < step; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
  }
};

struct Nothing {
  BATON_INLINE void request(int) const {}
};

// c [R, kPanel] = or += a [R, cols] times a panel; a's element (r, k) is a[r * step_r + k * step_k].
template <int R, class Load, class Next = Nothing>
inline void tile_float(const float* a, size_t step_r, size_t step_k, Load weights, int cols,
                       float* c, size_t ldc, bool accumulate, Next next = {}) {
  Vec acc[R][kPanelVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v)
      acc[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zeros();
  for (int k = 0; k < cols; ++k) {
    if (R >= kAheadFromRows) next.request(k);
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

template <int R, class Next>
BATON_INLINE void tile_int8(const uint8_t* a, const int8_t* panel, int cols, Next next,
                            int32_t* c) {
  __m512i acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  for (int k = 0; k < cols; k += 4) {
    const int8_t* p = panel + static_cast<size_t>(k) * kPanel;
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + 64, _MM_HINT_T0);
    if (R >= kAheadFromRows) next.request(k / 4);
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
// Added to activations when they are stored, because vpdpbusd needs unsigned numbers.
constexpr int kByteZero = 128;

#else

// |x| * sign(x) w: products of signed bytes. Sums of two of them cannot overflow 16 bits.
template <int R, class Next>
BATON_INLINE void tile_int8(const uint8_t* a, const int8_t* panel, int cols, Next next,
                            int32_t* c) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int k = 0; k < cols; k += 4) {
    const int8_t* p = panel + static_cast<size_t>(k) * kPanel;
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
    if (R >= kAheadFromRows) next.request(k / 4);
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

// Calls f<R>() for R = rows, from 1 to Max.
template <int Max, class F>
inline void with_rows(int rows, F f) {
  if constexpr (Max >= 1) {
    if (rows == Max) f(std::integral_constant<int, Max>{});
    else with_rows<Max - 1>(rows, f);
  }
}

// Computes the same for `a` with a row stride of `lda`, and fp32 weights with a row stride of
// `ldw`.
inline void multiply_float(const float* a, size_t lda, int rows, const float* panel, size_t ldw,
                           int cols, float* c, size_t ldc, bool accumulate) {
  with_rows<kMaxRows>(rows, [&](auto r) {
    tile_float<r()>(a, lda, 1, LoadFloat{panel, ldw}, cols, c, ldc, accumulate);
  });
}

// The first of the three bf16 rows for row r of a block.
constexpr int float_row(int r) { return r / kFloatRows * kAmxRows + r % kFloatRows * kParts; }

// The bytes of `rows` packed rows, rounded up to whole AMX registers.
inline size_t packed_row_bytes(const Weight& w, int rows) {
  if (w.kind == kBf16Pairs)
    return static_cast<size_t>((rows + kFloatRows - 1) / kFloatRows) * kAmxRows * 2 * w.padded_cols;
  if (w.kind == kInt8)
    return static_cast<size_t>((rows + kAmxRows - 1) / kAmxRows) * kAmxRows * w.padded_cols;
  return sizeof(float) * rows * w.padded_cols;
}

// Columns begin … end - 1 of the inputs.
struct Columns {
  int begin, end;
};

// The address of the next panel, the index of the present block of rows, and the number of blocks.
struct Turn {
  ptrdiff_t panels_on;
  int block, blocks;
};

// One row of a tile.
struct TileRow {
  Vec vecs[kPanelVecs];
};

BATON_INLINE TileRow load_row(const float* p) {
  TileRow row;
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVecs; ++v) row.vecs[v] = load(p + v * kLanes);
  return row;
}

BATON_INLINE void store_row(float* p, const TileRow& row) {
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVecs; ++v) store(p + v * kLanes, row.vecs[v]);
}

// Row r of a tile, computed from the sums of a byte product.
BATON_INLINE TileRow finished(const Weight& w, int panel, const int32_t* sums, int r, float scale) {
  TileRow row;
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVecs; ++v) {
    const int column = panel * kPanel + v * kLanes;
    const Words sum = load_words(sums + r * kPanel + v * kLanes);
    const Vec exact = from_int32(add(sum, load_words(w.offsets + column)));
    row.vecs[v] = mul(mul(exact, load(w.scales + column)), fill(scale));
  }
  return row;
}

// The same row, computed from the sums of the products of floats' parts.
BATON_INLINE TileRow finished(const Weight&, int, const float* sums, int r, float) {
  TileRow row;
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVecs; ++v) {
    const float* part = sums + float_row(r) * kPanel + v * kLanes;
    row.vecs[v] = add(add(load(part + 2 * kPanel), load(part + kPanel)), load(part));
  }
  return row;
}

// Multiplies one block of rows of x by some columns of one panel of w. Writes the result to tile
// [rows of the block, kPanel], or adds it to tile after the first column. `wide`: these columns of
// the panel in fp32, if they were widened.
inline void multiply_panel(const Weight& w, int panel, const float* wide, const Rows& x,
                           Share block, Columns columns, Turn turn, float* tile) {
  const int rows = block.end - block.begin;
  const size_t at = static_cast<size_t>(panel) * kPanel * w.padded_cols;
  const size_t start = static_cast<size_t>(block.begin) * w.padded_cols;
  if (w.kind == kInt8) {
    alignas(64) int32_t sums[kBlockRows * kPanel];
    const int8_t* bytes = static_cast<const int8_t*>(w.panels) + at;
    const Ahead next(bytes + turn.panels_on * kPanel * w.padded_cols, w.padded_cols / 4, 4 * kPanel,
                     turn.block, turn.blocks);
    with_rows<kMaxRowsInt8>(
        rows, [&](auto r) { tile_int8<r()>(x.bytes + start, bytes, w.padded_cols, next, sums); });
    for (int r = 0; r < rows; ++r)
      store_row(tile + r * kPanel, finished(w, panel, sums, r, x.scales[block.begin + r]));
    return;
  }
  const int count = columns.end - columns.begin;
  const float* a = x.values + start + static_cast<size_t>(columns.begin) * rows;
  const size_t before = at + static_cast<size_t>(columns.begin) * kPanel;
  const int bytes = w.kind == kFp32 ? 4 : w.kind == kBf16 ? 2 : 1;  // bytes of one element
  const char* raw = static_cast<const char*>(w.panels) + before * bytes;
  const Ahead next(raw + turn.panels_on * kPanel * w.padded_cols * bytes, count, kPanel * bytes,
                   turn.block, turn.blocks);
  if (wide == nullptr && w.kind == kBf16) {
    const LoadBf16 load{reinterpret_cast<const uint16_t*>(raw)};
    with_rows<kMaxRows>(rows, [&](auto r) {
      tile_float<r()>(a, 1, r(), load, count, tile, kPanel, columns.begin > 0, next);
    });
    return;
  }
  const LoadFloat load{wide ? wide : reinterpret_cast<const float*>(raw), kPanel};
  with_rows<kMaxRows>(rows, [&](auto r) {
    tile_float<r()>(a, 1, r(), load, count, tile, kPanel, columns.begin > 0, next);
  });
}

// Divides a product so that data that is read repeatedly stays in a core's cache (Goto and van de
// Geijn, "Anatomy of high-performance matrix multiplication", 2008). Activations of some rows and
// columns are multiplied by one panel after another. Sums wait in memory for further columns; no
// bit changes.
struct Blocking {
  int columns;
  int blocks;  // number of blocks of rows
  int panels;  // number of panels whose sums wait
  int tiles;   // number of tiles, of each matrix, that wait

  Blocking(const Weight& w, int rows, int weights) : columns(w.cols), panels(1), tiles(1) {
    const RowBlocks by(w, rows);
    const bool is_whole = w.kind == kInt8 || by.amx;  // multiplies all columns at once
    const size_t row_bytes = sizeof(float) * w.padded_cols;
    if (!is_whole && row_bytes * rows > kChunkBytes && w.cols > kMaxColumns) {
      const int parts = (w.cols + kMaxColumns - 1) / kMaxColumns;
      columns = ((w.cols + parts - 1) / parts + kLanes - 1) / kLanes * kLanes;
      panels = kWaitingPanels / weights;
    }
    const size_t block_bytes =
        is_whole ? packed_row_bytes(w, by.most) : by.most * columns * sizeof(float);
    blocks = std::max<int>(2, kChunkBytes / block_bytes);
    if (columns < w.cols) tiles = panels * blocks;
  }
};

// True if a chunk has enough rows that widening a panel once for all rows pays.
inline bool widens(const Weight& w, int rows) {
  return w.kind == kInt8AsFloat || (w.kind == kBf16 && rows >= kWidenFromRows);
}

// Widens some columns of a panel to fp32. The result is [columns][kPanel].
inline void widen_panel(const Weight& w, int panel, Columns columns, float* to) {
  const size_t at = static_cast<size_t>(panel) * kPanel * w.padded_cols;
  if (w.kind == kBf16) {
    const uint16_t* narrow = static_cast<const uint16_t*>(w.panels) + at;
    for (int k = columns.begin; k < columns.end; ++k)
      for (int v = 0; v < kPanelVecs; ++v, to += kLanes)
        store(to, load_bf16(narrow + k * kPanel + v * kLanes));
    return;
  }
  const int8_t* bytes = static_cast<const int8_t*>(w.panels) + at;
  for (int k = columns.begin; k < columns.end; ++k)
    for (int c = 0; c < kPanel; ++c, ++to)
      *to = w.scales[panel * kPanel + c] * bytes[(k / 4 * kPanel + c) * 4 + k % 4];
}

// The number of scratch floats of a thread that multiplies by `weights` matrices at once.
inline size_t linear_floats(const Weight& w, int rows, int weights) {
  const Blocking by(w, rows, weights);
  const size_t wide = widens(w, rows) ? static_cast<size_t>(by.columns) : 0;
  return weights * kPanel * (wide + static_cast<size_t>(by.tiles) * kBlockRows);
}

// Computes linear_tiles with AMX. The sums of one block are finished and consumed during the
// product of the next block.
template <class Sum, int kWeights, class Consume>
inline void amx_tiles(const Weight* const* weights, const Rows& x, const RowBlocks& blocks,
                      int chunk_blocks, Share share, Consume consume) {
  constexpr bool kFloat = std::is_same_v<Sum, float>;
  constexpr int kTileRows = kFloat ? kFloatRows : kAmxRows;
  const Weight& w = *weights[0];
  const AmxTiles registers(true);
  const int row_bytes = w.padded_cols * (kFloat ? 2 : 1);
  const int steps = row_bytes / kAmxInputs;
  alignas(64) Sum sums[2][kWeights][kBlockRows * kPanel];
  int now = 0;
  Share waiting(0, 0, 1);  // rows of the block whose sums wait
  int first = 0, waiting_panel = 0;
  const auto finish = [&](int count) {
    const int stop = std::min(waiting.end, waiting.begin + count);
    for (; waiting.begin < stop; ++waiting.begin) {
      const int row = waiting.begin;
      TileRow tiles[kWeights];
#pragma GCC unroll 2
      for (int i = 0; i < kWeights; ++i)
        tiles[i] =
            finished(*weights[i], waiting_panel, sums[now ^ 1][i], row - first, x.scales[row]);
      consume(row, waiting_panel, tiles);
    }
  };
  for (int chunk = 0; chunk < blocks.count; chunk += chunk_blocks)
    for (int panel = share.begin; panel < share.end; ++panel) {
      const int last = std::min(blocks.count, chunk + chunk_blocks);
      const bool once = last - chunk == 1;
      const size_t at = static_cast<size_t>(panel) * kPanel * row_bytes;
      for (int block = chunk; block < last; ++block) {
        const Share part = blocks[block];
        const uint8_t* a = x.bytes + packed_row_bytes(w, part.begin);
        const int per_step = (waiting.end - waiting.begin) / (kWeights * steps) + 1;
        for (int i = 0; i < kWeights; ++i) {
          const uint8_t* raw = static_cast<const uint8_t*>(weights[i]->panels) + at;
          // After the last panel there is nothing to prefetch.
          const ptrdiff_t on = panel + 1 < share.end ? kPanel * row_bytes : 0;
          const Ahead next(raw + on, steps, kPanel * kAmxInputs, block - chunk, last - chunk);
          const auto meanwhile = [&](int step) {
            next.request_lines(step);
            finish(per_step);
          };
          if (part.end - part.begin > kTileRows) {
            amx_multiply<2, kFloat>(a, raw, row_bytes, once, meanwhile);
            amx_store<2>(sums[now][i]);
          } else {
            amx_multiply<1, kFloat>(a, raw, row_bytes, once, meanwhile);
            amx_store<1>(sums[now][i]);
          }
        }
        finish(kBlockRows);
        waiting = part;
        first = part.begin;
        waiting_panel = panel;
        now ^= 1;
      }
    }
  finish(kBlockRows);
}

// Computes x @ w^T for panels share.begin … share.end - 1 of kWeights matrices of one shape. Calls
// consume(row, panel, tile rows) for each row and panel. The tile rows are kWeights rows, one for
// the same panel of each matrix. `scratch`: memory of linear_floats floats.
template <int kWeights, class Consume>
inline void linear_tiles(const Weight* const* weights, const Rows& x, int rows, Share share,
                         float* scratch, Consume consume) {
  const Weight& w = *weights[0];
  const Blocking by(w, rows, kWeights);
  const bool widen = widens(w, rows);
  const RowBlocks blocks(w, rows);
  if (blocks.amx && w.kind == kInt8) {
    amx_tiles<int32_t, kWeights>(weights, x, blocks, by.blocks, share, consume);
    return;
  }
  if (blocks.amx) {
    amx_tiles<float, kWeights>(weights, x, blocks, by.blocks, share, consume);
    return;
  }
  float* tiles = scratch;
  float* wide = scratch + static_cast<size_t>(kWeights) * by.tiles * kBlockRows * kPanel;
  const size_t wide_floats = static_cast<size_t>(by.columns) * kPanel;
  for (int chunk = 0; chunk < blocks.count; chunk += by.blocks)
    for (int group = share.begin; group < share.end; group += by.panels)
      for (int column = 0; column < w.cols; column += by.columns) {
        const Columns columns{column, std::min(w.cols, column + by.columns)};
        for (int panel = group; panel < std::min(share.end, group + by.panels); ++panel) {
          const int last = std::min(blocks.count, chunk + by.blocks);
          const ptrdiff_t panels_on = panel + 1 < share.end;  // the last one is requested again
          for (int i = 0; widen && i < kWeights; ++i)
            widen_panel(*weights[i], panel, columns, wide + i * wide_floats);
          for (int block = chunk; block < last; ++block) {
            const Share part = blocks[block];
            const int waiting = by.tiles > 1 ? (panel - group) * by.blocks + block - chunk : 0;
            float* sums = tiles + static_cast<size_t>(waiting) * kWeights * kBlockRows * kPanel;
            for (int i = 0; i < kWeights; ++i)
              multiply_panel(*weights[i], panel, widen ? wide + i * wide_floats : nullptr, x, part,
                             columns, {panels_on, block - chunk, last - chunk},
                             sums + i * kBlockRows * kPanel);
            for (int row = part.begin; columns.end == w.cols && row < part.end; ++row) {
              TileRow tile[kWeights];
              for (int i = 0; i < kWeights; ++i)
                tile[i] = load_row(sums + (i * kBlockRows + row - part.begin) * kPanel);
              consume(row, panel, tile);
            }
          }
        }
      }
}

// Computes the same for one matrix and this thread's share of the matrix's panels.
template <class Consume>
inline void linear_tiles(const Weight& w, const Rows& x, int rows, int thread, int threads,
                         float* scratch, Consume consume) {
  const Weight* weights[] = {&w};
  linear_tiles<1>(weights, x, rows, Share(w.num_panels(), thread, threads), scratch, consume);
}

// The number of columns of a panel without padding. The last panel may be padded.
inline int panel_columns(const Weight& w, int panel) {
  return std::min(kPanel, w.rows - panel * kPanel);
}

// Rounds a row x [cols] to bytes, and passes each sixteen bytes to put(first column, bytes).
// Returns the row's scale.
template <class Put>
[[gnu::noinline]] inline float round_to_bytes(const Weight& w, const float* x, Put put) {
  // Four maxima, so that no step depends on the step before.
  Vec most[4] = {zeros(), zeros(), zeros(), zeros()};
  int i = 0;
  for (; i + 4 * kLanes <= w.cols; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) most[v] = max(most[v], abs(load(x + i + v * kLanes)));
  for (; i + kLanes <= w.cols; i += kLanes) most[0] = max(most[0], abs(load(x + i)));
  float largest = max_lanes(max(max(most[0], most[1]), max(most[2], most[3])));
  for (; i < w.cols; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const Vec factor = fill(inverse);
  const __m128i zero = _mm_set1_epi8(static_cast<char>(kByteZero));
  for (i = 0; i + kLanes <= w.cols; i += kLanes)
    put(i, _mm_add_epi8(to_int8(mul(load(x + i), factor)), zero));
  for (; i < w.padded_cols; i += kLanes) {
    alignas(16) int8_t whole[kLanes];
    for (int j = 0; j < kLanes; ++j)
      whole[j] = i + j < w.cols ? static_cast<int8_t>(std::nearbyintf(x[i + j] * inverse)) : 0;
    put(i, _mm_add_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(whole)), zero));
  }
  return largest / 127.0f;
}

// In `to`, consecutive groups of four bytes are `step` rows apart.
inline float pack_bytes(const Weight& w, const float* x, size_t step, uint8_t* to) {
  return round_to_bytes(w, x, [&](int i, __m128i bytes) {
    alignas(16) uint8_t whole[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(whole), bytes);
    for (int j = 0; j < kLanes && i + j < w.padded_cols; j += 4)
      std::memcpy(to + (i + j) * step, whole + j, 4);
  });
}

inline float pack_bytes_for_amx(const Weight& w, const float* x, uint8_t* to) {
  return round_to_bytes(w, x, [&](int i, __m128i bytes) {
    const int at = i / kAmxInputs * kAmxInputs * kAmxRows + i % kAmxInputs;
    _mm_store_si128(reinterpret_cast<__m128i*>(to + at), bytes);
  });
}

inline void pack_parts(const Weight& w, const float* x, uint8_t* to) {
  constexpr int kInputs = kAmxInputs / 2;
  for (int i = 0; i < w.padded_cols; i += kLanes) {
    alignas(64) float tail[kLanes] = {};
    const float* from = x + i;
    if (i + kLanes > w.cols) {
      if (i < w.cols) std::memcpy(tail, from, sizeof(float) * (w.cols - i));
      from = tail;
    }
    put_parts(from, to + i / kInputs * kAmxRows * kAmxInputs + i % kInputs * 2);
  }
}

// Packs this thread's share of `rows` rows for products with `w`. fetch(row, slot) returns the
// address of the row [cols]. The address stays valid until the same slot, below kBlockRows, is
// fetched again.
template <class Fetch>
inline void pack_rows(const Weight& w, Share mine, int rows, const Rows& to, Fetch fetch) {
  const RowBlocks blocks(w, rows);
  for (int row = mine.begin; row < mine.end;) {
    const Share block = blocks.of_row(row);
    const int step = block.end - block.begin, before = row - block.begin;
    const int count = std::min(mine.end, block.end) - row;
    const size_t start = static_cast<size_t>(block.begin) * w.padded_cols;
    const float* x[kBlockRows];
    if (w.kind == kBf16Pairs) {
      uint8_t* first = to.bytes + packed_row_bytes(w, block.begin);
      for (int r = 0; r < count; ++r) {
        const int at = before + r, tile = at / kFloatRows * kFloatRows;
        pack_parts(w, fetch(row + r, 0),
                   first + packed_row_bytes(w, tile) + at % kFloatRows * kParts * kAmxInputs);
      }
    } else if (w.kind == kInt8) {
      for (int r = 0; r < count; ++r) {
        const int at = before + r;
        const size_t tile = static_cast<size_t>(at / kAmxRows * kAmxRows) * w.padded_cols;
        uint8_t* first = to.bytes + start;
        to.scales[row + r] = blocks.amx
                                 ? pack_bytes_for_amx(w, fetch(row + r, 0),
                                                      first + tile + at % kAmxRows * kAmxInputs)
                                 : pack_bytes(w, fetch(row + r, 0), step, first + at * 4);
      }
    } else {
      for (int r = 0; r < count; ++r) x[r] = fetch(row + r, r);
      for (int k = 0; k < w.cols; k += kPackColumns)  // so that the written lines stay in the cache
        for (int r = 0; r < count; ++r)
          for (int i = k; i < std::min(w.cols, k + kPackColumns); ++i)
            to.values[start + static_cast<size_t>(i) * step + before + r] = x[r][i];
    }
    row += count;
  }
}

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// AMX multiplies int8 only if each row fills whole registers. So rows are padded unless they are
// short.
inline int padded_cols(int kind, int cols) {
  if (kind == kBf16Pairs) return round_up(cols, kAmxInputs / 2);
  if (kind != kInt8) return cols;
  return round_up(cols, BATON_AMX && cols >= kAmxInputs ? kAmxInputs : 4);
}

inline size_t packed_bytes(int kind, int rows, int cols) {
  const size_t elements =
      static_cast<size_t>((rows + kPanel - 1) / kPanel) * kPanel * padded_cols(kind, cols);
  return elements * (kind == kFp32 ? 4 : kind == kInt8 ? 1 : 2);
}

// Packs `source` [rows, cols] fp32. For int8, writes scales and offsets [num_panels * kPanel].
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
      } else if (kind == kBf16Pairs) {
        const size_t at = panel + (static_cast<size_t>(k / 2) * kPanel + column) * 2 + k % 2;
        static_cast<uint16_t*>(panels)[at] = float_to_bf16(value);
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
