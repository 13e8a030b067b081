// Attention of a ragged batch over paged KV.
//
// A task is a KV head and a few tokens of one row. The queries of all query heads that share the KV
// head are the rows of a small matrix product. A task reads the context in tiles of kTile tokens
// with a running softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). The
// softmax starts anew in each partition of kPartition tokens; partitions are joined in order. Tiles
// and partitions begin at fixed positions of the sequence. So the bits of a query's result depend
// only on its own context: not on other rows, the number of queries, the thread, or the way in
// which threads share a context.
#pragma once

#include <limits>
#include <vector>

#include "whole.h"

namespace baton {

constexpr int kTile = 32;         // tokens; a multiple of kPanel
constexpr int kPartition = 1024;  // tokens; a multiple of kTile
constexpr int kTaskQueries = 96;  // query vectors of one task; at least those of one token
constexpr int kTilesAhead = 6;    // tiles that are prefetched if a task has few queries
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The positions of a tile's tokens, to be compared with the positions that a query attends to.
struct TilePlaces {
  alignas(64) float places[kTile] = {};
  constexpr TilePlaces() {
    for (int t = 0; t < kTile; ++t) places[t] = static_cast<float>(t);
  }
};
inline constexpr TilePlaces kTilePlaces;

// Mirrored in structs.py.
struct Batch {
  const int32_t* cu_seqlens_q;  // [num_rows + 1]
  const int32_t* context_lens;  // [num_rows]
  const int32_t* block_tables;  // [num_rows, max_blocks]
  const int64_t* slot_mapping;  // [num_tokens]
  int32_t num_rows;
  int32_t num_tokens;
  int32_t max_blocks;
  int32_t unused;
};

struct Scoring {
  float scaling;
  float softcap;   // 0: none
  int32_t window;  // 0: none
};

struct Task {
  int row, head, first, count;  // tokens first … first + count - 1 of the row's queries
  int partition;                // one partition, or all: -1
  int part;                     // index of the partial result, with one partition
};

inline int padded_head(int head_dim) { return (head_dim + kPanel - 1) / kPanel * kPanel; }

// The running softmax of a task's queries: sums [queries, padded head], maxima and totals.
struct Partial {
  float* sums;
  float* peaks;
  float* totals;

  Partial(float* memory, int queries, int padded)
      : sums(memory), peaks(memory + static_cast<size_t>(queries) * padded),
        totals(peaks + queries) {}
  static size_t floats(int queries, int padded) {
    return static_cast<size_t>(queries) * (padded + 2);
  }
};

// The places of a tile's tokens in the record.
struct Places {
  uint8_t* elements[kTile];
  uint8_t* scales[kTile];

  Place operator[](int t) const { return {elements[t], scales[t]}; }
  // Prefetches one cache line of a token of the next tile. Lines are prefetched one by one, because
  // the heads of a block are far apart. The processor cannot guess the next line, and waits for few
  // lines at a time.
  BATON_INLINE void request(int t, int byte) const {
    _mm_prefetch(reinterpret_cast<const char*>(elements[t]) + byte, _MM_HINT_T0);
  }
};

// V of a tile, in the form that tile_float reads. Prefetches V of the next tile meanwhile.
template <int32_t format>
struct LoadTokens {
  const Places* places;
  const Places* next;
  int first;  // dimension

  BATON_INLINE Vec operator()(int t, int v) const {
    const int byte = (first + v * kLanes) * kWord / elements_per_word(format);
    if (byte % 64 == 0) next->request(t, byte);
    return read_vec<format>((*places)[t], first + v * kLanes);
  }
};

// For queries that are computed together: the numbers that are subtracted from their scores, and
// the factors of their sums so far (at first the exponents of these factors).
struct Peaks {
  alignas(64) float origins[kLanes] = {}, fades[kLanes] = {};
};

// A thread's working memory for int8 KV.
struct WholeScratch {
  bool few;            // few queries: K and V are multiplied in registers
  bool many;           // many queries: AMX multiplies, see ManyScratch
  const Task* next;    // the next task, whose first tokens are prefetched at the end; or null
  uint8_t* queries;    // blocks of queries as pack_whole writes them, or few as pack_query does
  float* query_steps;  // the unit of each query's numbers
  int32_t query_offsets[kWholeRows];  // of few queries: see few_scores
  int8_t* keys;                       // [kTile / kPanel][cols / 4][kPanel][4]
  int8_t* values;                     // [padded / kPanel][kTile / 4][kPanel][4]
};

#if BATON_AMX
// A thread's working memory for int8 KV and many queries.
struct ManyScratch {
  SixteenQueries* sixteens;
  uint8_t* queries;  // panels, one for each sixteen queries
  uint8_t* keys;     // [2][cols / 64][16][64], as amx_multiply reads them
  int8_t* values;    // [padded / kPanel][3][kTile / 4][kPanel][4], of which the middle one is V
  float* scores;     // [kTile][16]
  int32_t* sums;     // [padded / kPanel][2][16][kPanel]
};
#endif

class Attention {
 public:
  // `group`: number of query heads per KV head.
  Attention(const Cache& cache, int group)
      : cache_(cache), group_(group), padded_(padded_head(cache.head_dim)),
        tokens_per_task_(std::max(1, kTaskQueries / group)),
        is_whole_(cache.format == kKvInt8 && cache.head_dim <= kWholeMaxCols),
        are_few_(BATON_AVX512 && is_whole_ && cache.head_dim % kGroupBytes == 0 &&
                 cache.block_size % kLanes == 0),
        whole_cols_(round_up(cache.head_dim, BATON_AMX ? kAmxInputs : 4)),
        nothing_(cache.token_bytes + kGroupBytes) {}

  // Plans the tasks of a batch for `threads` threads. Splits long contexts if there are few rows.
  void plan(const Batch& batch, int threads) {
    tasks_.clear();
    num_parts_ = 0;
    threads_ = threads;
    uses_amx_ = amx_is_used;
    int whole = 0;
    for (int row = 0; row < batch.num_rows; ++row)
      whole +=
          (queries(batch, row) + tokens_per_task_ - 1) / tokens_per_task_ * cache_.num_kv_heads;
    const bool split = whole < 4 * threads;
    for (int row = batch.num_rows - 1; row >= 0; --row) {
      const int count = queries(batch, row);
      const int partitions = (batch.context_lens[row] + kPartition - 1) / kPartition;
      for (int first = (count - 1) / tokens_per_task_ * tokens_per_task_; first >= 0;
           first -= tokens_per_task_) {
        const int tokens = std::min(tokens_per_task_, count - first);
        for (int head = 0; head < cache_.num_kv_heads; ++head) {
          if (!split || partitions == 1) {
            tasks_.push_back({row, head, first, tokens, -1, -1});
            continue;
          }
          for (int p = 0; p < partitions; ++p)
            tasks_.push_back({row, head, first, tokens, p, num_parts_++});
        }
      }
    }
    parts_.resize(num_parts_ * part_floats());
  }

  int num_tasks() const { return static_cast<int>(tasks_.size()); }
  bool has_parts() const { return num_parts_ > 0; }

  // Computes one task of a layer. query and out: [num_tokens, num_heads * head_dim], with strides.
  void run(int index, const Batch& batch, int layer, const Scoring& scoring, const float* query,
           size_t query_stride, float* out, size_t out_stride, float* scratch) {
    cache_.attend(*this, index, batch, layer, scoring, query, query_stride, out, out_stride,
                  scratch);
  }
  template <int32_t format>
  void run_as(int index, const Batch& batch, int layer, const Scoring& scoring, const float* query,
              size_t query_stride, float* out, size_t out_stride, float* scratch) {
    const Task& task = tasks_[index];
    const int queries = task.count * group_;
    const int end = end_of(batch, task), oldest = oldest_of(batch, task, scoring);
    float* q = scratch;
    float* rest = q + max_queries() * padded_;
    load_queries(batch, task, query, query_stride, q);
    const int last = (end - 1) / kPartition;
    WholeScratch whole{};
    whole.many = is_whole_ && uses_amx_ && queries > kWholeRows;
    const AmxTiles registers(whole.many);
    whole.few = are_few_ && queries <= kWholeRows;
    if (is_whole_ && !whole.many) rest = begin_whole(q, queries, rest, whole);
    const size_t next = index + threads_;  // the task that this thread is likely to compute next
    whole.next = next < tasks_.size() ? &tasks_[next] : nullptr;
    if (task.partition >= 0) {
      Partial own = part(task.part, queries);
      reset(own, queries);
      walk<format>(batch, task, layer, scoring, q, end, oldest, task.partition, own, whole, rest);
      return;
    }
    Partial total(rest, queries, padded_);
    Partial own(rest + part_floats(), queries, padded_);
    rest += 2 * part_floats();
    const int first = oldest / kPartition;
    reset(total, queries);
    if (first == last) {
      walk<format>(batch, task, layer, scoring, q, end, oldest, first, total, whole, rest);
    } else {
      for (int p = first; p <= last; ++p) {
        reset(own, queries);
        walk<format>(batch, task, layer, scoring, q, end, oldest, p, own, whole, rest);
        merge(total, own, queries);
      }
    }
    finish(batch, task, total, out, out_stride);
  }

  // Joins the parts of split tasks and writes the results, for one thread's share of the tasks.
  void join(const Batch& batch, int thread, int threads, float* out, size_t out_stride,
            float* scratch) {
    int seen = 0;
    for (size_t i = 0; i < tasks_.size(); ++i) {
      const Task& task = tasks_[i];
      if (task.partition != 0) continue;
      if (seen++ % threads != thread) continue;
      const int queries = task.count * group_;
      Partial total(scratch, queries, padded_);
      reset(total, queries);
      for (size_t j = i; j < tasks_.size() && (j == i || tasks_[j].partition > 0); ++j)
        merge(total, part(tasks_[j].part, queries), queries);
      finish(batch, task, total, out, out_stride);
    }
  }

  size_t scratch_floats() const {
    const size_t queries = max_queries();
    return 2 * part_floats() + queries * (padded_ + kTile) +
           2 * kTile * static_cast<size_t>(padded_) + 3 * queries + 64 +
           (is_whole_ ? whole_floats() : 0);
  }

 private:
  static int queries(const Batch& batch, int row) {
    return batch.cu_seqlens_q[row + 1] - batch.cu_seqlens_q[row];
  }
  size_t max_queries() const { return static_cast<size_t>(tokens_per_task_) * group_; }
  size_t part_floats() const { return Partial::floats(max_queries(), padded_); }
  Partial part(int index, int queries) {
    return Partial(parts_.data() + index * part_floats(), queries, padded_);
  }

  // The position of the task's last query, plus one.
  static int end_of(const Batch& batch, const Task& task) {
    return batch.context_lens[task.row] - queries(batch, task.row) + task.first + task.count;
  }
  // The first position that any query of the task attends to.
  static int oldest_of(const Batch& batch, const Task& task, const Scoring& scoring) {
    if (scoring.window == 0) return 0;
    return std::max(0, end_of(batch, task) - task.count + 1 - scoring.window);
  }

  void reset(Partial& p, int queries) const {
    std::fill_n(p.sums, static_cast<size_t>(queries) * padded_, 0.0f);
    std::fill_n(p.peaks, queries, kMinusInfinity);
    std::fill_n(p.totals, queries, 0.0f);
  }

  // Loads the task's query vectors, [token, head of the group] as rows, padded with zeros.
  void load_queries(const Batch& batch, const Task& task, const float* query, size_t stride,
                    float* q) const {
    const int n = cache_.head_dim;
    const int start = batch.cu_seqlens_q[task.row] + task.first;
    for (int t = 0; t < task.count; ++t)
      for (int g = 0; g < group_; ++g, q += padded_) {
        std::memcpy(q, query + (start + t) * stride + (task.head * group_ + g) * n,
                    sizeof(float) * n);
        std::fill(q + n, q + padded_, 0.0f);
      }
  }

  template <int32_t format>
  void walk(const Batch& batch, const Task& task, int layer, const Scoring& scoring, const float* q,
            int end, int oldest, int partition, Partial& p, const WholeScratch& whole,
            float* scratch) const {
    const int queries = task.count * group_;
#if BATON_AVX512
    if (format == kKvInt8 && whole.few) {
      with_rows<kWholeRows>(queries, [&](auto r) {
        walk_few<r()>(batch, task, layer, scoring, end, oldest, partition, p, whole);
      });
      return;
    }
#endif
#if BATON_AMX
    if (format == kKvInt8 && whole.many) {
      walk_many(batch, task, layer, scoring, q, end, oldest, partition, p, scratch);
      return;
    }
#endif
    float* keys = scratch;                     // [kTile / kPanel][padded][kPanel]
    float* values = keys + kTile * padded_;    // [kTile][padded]
    float* scores = values + kTile * padded_;  // [queries, kTile]
    if (padded_ != cache_.head_dim)
      std::fill_n(keys, 2 * kTile * padded_, 0.0f);  // padding stays zero
    alignas(64) float key_scales[kTile], value_scales[kTile];
    alignas(64) int32_t key_sums[kTile];
    Places keys_at[2], values_at[2];  // of this tile and the next
    const int begin = std::max(partition * kPartition, oldest / kTile * kTile);
    const int stop = std::min((partition + 1) * kPartition, end);
    const int32_t* table = batch.block_tables + static_cast<size_t>(task.row) * batch.max_blocks;
    const bool reads_values_once =
        queries <= kMaxRows && format != kKvInt4 && padded_ == cache_.head_dim;
    find_tile(table, layer, task.head, begin, end, keys_at[0], values_at[0]);
    for (int tile = begin; tile < stop; tile += kTile) {
      const int now = (tile - begin) / kTile % 2;
      const Places &key_places = keys_at[now], &next_keys = keys_at[1 - now];
      const Places &value_places = values_at[now], &next_values = values_at[1 - now];
      const int later = tile + kTile < stop ? tile + kTile : tile;  // to prefetch meanwhile
      find_tile(table, layer, task.head, later, end, keys_at[1 - now], values_at[1 - now]);
      if (scales_apart(format)) {
        read_scales(key_places, key_scales);
        read_scales(value_places, value_scales);
      }
      if (format == kKvInt8 && is_whole_) {
        read_whole_keys(key_places, next_keys, whole.keys, key_sums);
        score_whole(queries, whole, key_sums, scores);
      } else {
        read_keys<format>(key_places, next_keys, keys);
      }
      for (int row = 0; !(format == kKvInt8 && is_whole_) && row < queries; row += kMaxRows) {
        const int rows = std::min(kMaxRows, queries - row);
        for (int panel = 0; panel < kTile / kPanel; ++panel)
          multiply_float(q + row * padded_, padded_, rows,
                         keys + static_cast<size_t>(panel) * padded_ * kPanel, kPanel, padded_,
                         scores + row * kTile + panel * kPanel, kTile, false);
      }
      for (int i = 0; i < queries; ++i) {
        Peaks peak;
        float* row = scores + i * kTile;
        find_peaks<scales_apart(format), 1>(scoring, end - task.count, tile, key_scales, row, p, i,
                                            peak);
        weigh<scales_apart(format), 1>(value_scales, row, p, i, peak);
        if (peak.fades[0] != 1.0f)
          scale_sums(p.sums + static_cast<size_t>(i) * padded_, peak.fades[0]);
      }
      if (format == kKvInt8 && is_whole_) {
        read_whole_values(value_places, next_values, whole.values, kTile * kPanel);
        add_whole_values(queries, scores, whole, p);
        continue;
      }
      if (reads_values_once) {
        const LoadTokens<format> load{&value_places, &next_values, 0};
        add_values(queries, scores, load, p.sums);
        continue;
      }
      for (int t = 0; t < kTile; ++t) {
        for (int byte = 0; byte < cache_.token_bytes; byte += 64) next_values.request(t, byte);
        read_token<format>(cache_, value_places[t], values + t * padded_);
      }
      for (int row = 0; row < queries; row += kMaxRows) {
        const int rows = std::min(kMaxRows, queries - row);
        for (int panel = 0; panel < padded_ / kPanel; ++panel)
          multiply_float(scores + row * kTile, kTile, rows, values + panel * kPanel, padded_, kTile,
                         p.sums + row * padded_ + panel * kPanel, padded_, true);
      }
    }
  }

#if BATON_AVX512

  // Sixteen tokens of one block; some of them may be missing.
  struct Sixteen {
    const uint8_t *keys, *values, *key_scales, *value_scales;
    __mmask16 present;

    BATON_INLINE void request(int line) const {
      _mm_prefetch(reinterpret_cast<const char*>(keys) + line * 64, _MM_HINT_T1);
    }
    void request_all(int cols) const {
      for (int line = 0; line < cols * kLanes / 64; ++line) {
        request(line);
        _mm_prefetch(reinterpret_cast<const char*>(values) + line * 64, _MM_HINT_T1);
      }
    }
  };

  // The scores and factors of R queries for one tile, between the steps of walk_few.
  template <int R>
  struct FewTile {
    alignas(64) float scores[R * kTile], key_scales[kTile], value_scales[kTile];
    alignas(64) uint8_t weights[2 * R * kTile];
    float steps[R];
    Peaks peaks;
    int groups;  // number of groups of sixteen tokens with any token present
    const uint8_t *values[kTile / kLanes], *later_values[kTile / kLanes];
  };

  // Computes a task of R queries over int8 KV. The bits equal those of the code for many queries.
  template <int R>
  void walk_few(const Batch& batch, const Task& task, int layer, const Scoring& scoring, int end,
                int oldest, int partition, Partial& p, const WholeScratch& whole) const {
    constexpr int kGroups = kTile / kLanes;
    const int n = cache_.head_dim;
    FewTile<R> tiles[2];
    const int begin = std::max(partition * kPartition, oldest / kTile * kTile);
    const int stop = std::min((partition + 1) * kPartition, end);
    const auto find = [&](const Task& of, int first, int end) {
      const int32_t* blocks = batch.block_tables + static_cast<size_t>(of.row) * batch.max_blocks;
      const int present = std::clamp(end - first, 0, kLanes);
      const int at = present > 0 ? first : 0;
      const Place key =
          place(cache_, layer, of.head, blocks[at / cache_.block_size], at % cache_.block_size);
      const size_t apart = cache_.num_kv_heads * cache_.head_bytes;
      return Sixteen{key.elements, key.elements + apart, key.scale, key.scale + apart,
                     static_cast<__mmask16>((1u << present) - 1)};
    };
    const int ahead = std::min(kTilesAhead * kTile, round_up(end - begin, kTile));
    // Finds later tokens of this task, or the first tokens of the next task.
    const auto find_later = [&](int first) {
      if (first < end || whole.next == nullptr) return find(task, first, end);
      const Task& next = *whole.next;
      const int start = oldest_of(batch, next, scoring) / kTile * kTile;
      const int more = std::max(0, first - round_up(end, kTile));
      return find(next, start + more, end_of(batch, next));
    };
    const auto score = [&](int tile, FewTile<R>& of) {
      of.groups = std::min(kGroups, (end - tile + kLanes - 1) / kLanes);
      for (int g = 0; g < kGroups; ++g) {
        const Sixteen now = find(task, tile + g * kLanes, end);
        const Sixteen later = find_later(tile + ahead + g * kLanes);
        of.values[g] = now.values;
        of.later_values[g] = later.values;
        store(of.key_scales + g * kLanes, _mm512_maskz_loadu_ps(now.present, now.key_scales));
        store(of.value_scales + g * kLanes, _mm512_maskz_loadu_ps(now.present, now.value_scales));
        _mm_prefetch(reinterpret_cast<const char*>(later.key_scales), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(later.value_scales), _MM_HINT_T1);
        if (g >= of.groups) {  // no token is visible
          if (later.present) later.request_all(n);
          for (int r = 0; r < R; ++r) store(of.scores + r * kTile + g * kLanes, zeros());
          continue;
        }
        Words products[R];
        few_scores<R>(whole.queries, whole.query_offsets, now.keys, n, products, later);
        for (int r = 0; r < R; ++r)
          store(of.scores + r * kTile + g * kLanes,
                mul(from_int32(products[r]), fill(whole.query_steps[r])));
      }
      find_peaks<true, R>(scoring, end - task.count, tile, of.key_scales, of.scores, p, 0,
                          of.peaks);
    };
    const auto weigh_tile = [&](FewTile<R>& of) {
      weigh<true, R>(of.value_scales, of.scores, p, 0, of.peaks);
      for (int r = 0; r < R; ++r) {
        const float* row = of.scores + r * kTile;
        const Vec inverse = fill(inverse_step(row, kTile, of.steps[r]));
        uint8_t* to = of.weights + 2 * r * kTile;
        for (int t = 0; t < kTile; t += kLanes) {
          const Words number = to_int32(mul(load(row + t), inverse));
          store_low_bytes(to + t, number);
          store_low_bytes(to + kTile + t, _mm512_srli_epi32(number, 8));
        }
      }
    };
    if (begin >= stop) return;  // the window begins after this partition
    // Computes the next tile's scores during the computation of this tile's weights, whose steps
    // depend on one another.
    score(begin, tiles[0]);
    weigh_tile(tiles[0]);
    for (int tile = begin, i = 0; tile < stop; tile += kTile, i ^= 1) {
      const FewTile<R>& now = tiles[i];
      const bool more = tile + kTile < stop;
      if (more) score(tile + kTile, tiles[i ^ 1]);
      for (int first = 0; first < n; first += kGroupBytes)
        few_values<R>(now.weights, now.steps, now.peaks.fades, now.values, now.later_values, kTile,
                      now.groups, n, first, p.sums, padded_);
      if (more) weigh_tile(tiles[i ^ 1]);
    }
    for (int i = 0; i < R * n; i += kGroupBytes) exchange_quarters(p.sums + i);
  }

#endif

  // Scales the scores [R, kTile] of queries i … i + R - 1, hides the scores of tokens that a query
  // does not attend to, and raises the maxima. `position`: position of the task's first query.
  template <bool kScaled, int R>
  [[gnu::noinline]] void find_peaks(const Scoring& scoring, int position, int tile,
                                    const float* key_scales, float* scores, Partial& p, int i,
                                    Peaks& peaks) const {
    constexpr int kVecs = kTile / kLanes;
    const Vec scaling = fill(scoring.scaling);
#pragma GCC unroll 7
    for (int r = 0; r < R; ++r) {
      float* row = scores + r * kTile;
      Vec s[kVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        s[v] = mul(load(row + v * kLanes), scaling);
        if (kScaled) s[v] = mul(s[v], load(key_scales + v * kLanes));
        if (scoring.softcap > 0)
          s[v] = mul(fill(scoring.softcap), tanh(div(s[v], fill(scoring.softcap))));
      }
      const int beyond = position + (i + r) / group_ + 1 - tile;  // this token and later ones
      const int hidden = scoring.window > 0 ? beyond - scoring.window : 0;
      if (beyond < kTile || hidden > 0) {
        const Vec nothing = fill(kMinusInfinity);
        const Vec last = fill(static_cast<float>(beyond)), first = fill(static_cast<float>(hidden));
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) {
          const Vec token = load(kTilePlaces.places + v * kLanes);
          s[v] = where_less(token, last, s[v], nothing);
          s[v] = where_less(token, first, nothing, s[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) store(row + v * kLanes, s[v]);
      Vec most = s[0];
#pragma GCC unroll 2
      for (int v = 1; v < kVecs; ++v) most = max(most, s[v]);
      const float old = p.peaks[i + r], peak = std::max(old, max_lanes(most));
      peaks.origins[r] = peak == kMinusInfinity ? 0.0f : peak;  // no token was visible so far
      peaks.fades[r] = old - peaks.origins[r];
      p.peaks[i + r] = peak;
    }
  }

  // Computes weights from the scores, and the factors of the sums so far from the exponents in
  // `peaks`.
  template <bool kScaled, int R>
  [[gnu::noinline]] void weigh(const float* value_scales, float* scores, Partial& p, int i,
                               Peaks& peaks) const {
    if (R == 1 && peaks.fades[0] == 0) peaks.fades[0] = 1.0f;  // the usual case
    else store(peaks.fades, exp(load(peaks.fades)));
#pragma GCC unroll 7
    for (int r = 0; r < R; ++r) {
      const Vec origin = fill(peaks.origins[r]);
      Vec sum = zeros();
#pragma GCC unroll 2
      for (int v = 0; v < kTile / kLanes; ++v) {
        float* at = scores + r * kTile + v * kLanes;
        const Vec weight = exp(sub(load(at), origin));
        sum = add(sum, weight);
        store(at, kScaled ? mul(weight, load(value_scales + v * kLanes)) : weight);
      }
      p.totals[i + r] = std::fma(p.totals[i + r], peaks.fades[r], sum_lanes(sum));
    }
  }

  // e^(old - new) for two maxima.
  static float fade_of(float old_peak, float new_peak) {
    alignas(64) float lanes[kLanes];
    if (old_peak == new_peak) return 1.0f;
    store(lanes, exp(fill(old_peak - new_peak)));
    return lanes[0];
  }

  void scale_sums(float* sums, float factor) const {
    for (int d = 0; d < padded_; d += kLanes) store(sums + d, mul(load(sums + d), fill(factor)));
  }

  // Joins `next`, the softmax of the next partition, to `total`.
  void merge(Partial& total, const Partial& next, int queries) const {
    for (int i = 0; i < queries; ++i) {
      if (next.peaks[i] == kMinusInfinity) continue;
      const float peak = std::max(total.peaks[i], next.peaks[i]);
      const float old = total.peaks[i] == kMinusInfinity ? 0.0f : fade_of(total.peaks[i], peak);
      const float fresh = fade_of(next.peaks[i], peak);
      float* a = total.sums + static_cast<size_t>(i) * padded_;
      const float* b = next.sums + static_cast<size_t>(i) * padded_;
      for (int d = 0; d < padded_; d += kLanes)
        store(a + d, fma(load(b + d), fill(fresh), mul(load(a + d), fill(old))));
      total.totals[i] = std::fma(next.totals[i], fresh, total.totals[i] * old);
      total.peaks[i] = peak;
    }
  }

  void finish(const Batch& batch, const Task& task, const Partial& total, float* out,
              size_t stride) const {
    const int n = cache_.head_dim;
    const int start = batch.cu_seqlens_q[task.row] + task.first;
    for (int t = 0; t < task.count; ++t)
      for (int g = 0; g < group_; ++g) {
        const int i = t * group_ + g;
        float* to = out + (start + t) * stride + (task.head * group_ + g) * n;
        const float* sums = total.sums + static_cast<size_t>(i) * padded_;
        const float whole = total.totals[i];
        int d = 0;
        for (; d + kLanes <= n; d += kLanes) store(to + d, div(load(sums + d), fill(whole)));
        for (; d < n; ++d) to[d] = sums[d] / whole;
      }
  }

  // Finds K and V of a tile's tokens. Missing tokens are at `nothing_`, which is zeros.
  BATON_INLINE void find_tile(const int32_t* table, int layer, int head, int first, int end,
                              Places& keys, Places& values) const {
    const int size = cache_.block_size;
    const int present = std::min(kTile, end - first);
    for (int t = 0; t < present;) {
      const int offset = (first + t) % size;
      const int run = std::min(present - t, size - offset);
      const int32_t block = table[(first + t) / size];
      Place key = place(cache_, layer, head, block, offset);
      Place value = place(cache_, layer, cache_.num_kv_heads + head, block, offset);
      _mm_prefetch(reinterpret_cast<const char*>(key.scale), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(value.scale), _MM_HINT_T0);
      for (int i = 0; i < run; ++i, ++t) {
        keys.elements[t] = key.elements + i * cache_.token_bytes;
        values.elements[t] = value.elements + i * cache_.token_bytes;
        keys.scales[t] = key.scale + 4 * i;
        values.scales[t] = value.scale + 4 * i;
      }
    }
    uint8_t* none = const_cast<uint8_t*>(nothing_.data());
    for (int t = present; t < kTile; ++t)
      keys.elements[t] = keys.scales[t] = values.elements[t] = values.scales[t] = none;
  }

  // sums [queries, padded] += weights [queries, kTile] times V, read from the record. The order and
  // the bits equal those of the code for many queries, which first reads V into scratch.
  template <int32_t format>
  void add_values(int queries, const float* weights, LoadTokens<format> load, float* sums) const {
    with_rows<kMaxRows>(queries, [&](auto r) {
      for (int panel = 0; panel < padded_; panel += kPanel) {
        load.first = panel;
        tile_float<r()>(weights, kTile, 1, load, kTile, sums + panel, padded_, true);
      }
    });
  }

  // Reads K of a tile, transposed: [kTile / kPanel][padded][kPanel]. Words of the record are
  // transposed before they are expanded, because there are fewer words than elements.
  template <int32_t format>
  void read_keys(const Places& places, const Places& next, float* keys) const {
    constexpr int kPerWord = elements_per_word(format);
    const int words = (cache_.token_bytes + kWord - 1) / kWord;
    const int half = cache_.head_dim / 2;
    alignas(64) float steps[kLanes] = {}, lows[kLanes] = {};
    alignas(64) uint8_t tails[kLanes][kGroupBytes];
    const uint8_t* tail_rows[kLanes];
    for (int token = 0; token < kTile; token += kLanes) {
      float* to = keys + static_cast<size_t>(token / kPanel) * padded_ * kPanel + token % kPanel;
      if (format == kKvInt4)
        for (int i = 0; i < kLanes; ++i) {
          steps[i] = int4_step(places[token + i]);
          lows[i] = int4_low(places[token + i]);
        }
      const Vec step = load(steps), low = load(lows);
      for (int word = 0; word < words; word += kLanes) {
        const int bytes = std::min(kGroupBytes, cache_.token_bytes - word * kWord);
        const uint8_t* const* rows = places.elements + token;
        size_t before = word * kWord;
        if (bytes < kGroupBytes) {  // no byte after the token may be read
          for (int i = 0; i < kLanes; ++i) {
            std::memcpy(tails[i], rows[i] + before, bytes);
            tail_rows[i] = tails[i];
          }
          rows = tail_rows;
          before = 0;
        }
        Vec columns[kLanes];
        transpose(rows, before, columns);
        const auto expand = [&](int w) {
          const size_t dim = format == kKvInt4 ? (word + w) * 4 : (word + w) * kPerWord;
          expand_words<format>(columns[w], to + dim * kPanel, kPanel, half, step, low);
        };
        if (words - word < kLanes) {
          for (int w = 0; w < words - word; ++w) expand(w);
          continue;
        }
#pragma GCC unroll 16
        for (int w = 0; w < kLanes; ++w) {
          next.request(token + w, word * kWord);
          expand(w);
        }
      }
    }
  }

  static size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t query_blocks_bytes(int queries) const {
    const int blocks = (queries + kWholeRows - 1) / kWholeRows;
    return lines(blocks * whole_bytes(whole_cols_));
  }
  size_t whole_floats() const {
#if BATON_AMX
    return std::max(plain_whole_floats(), many_bytes() / 4 + 64);
#else
    return plain_whole_floats();
#endif
  }
  size_t plain_whole_floats() const {
    const size_t keys = static_cast<size_t>(kTile) * whole_cols_;
    const size_t values = static_cast<size_t>(kTile) * padded_;
    return (query_blocks_bytes(max_queries()) + lines(4 * max_queries()) + keys + values) / 4 + 64;
  }

  // Rounds the queries [queries, padded] to whole numbers. Takes memory from `scratch` and returns
  // the unused part.
  float* begin_whole(const float* q, int queries, float* scratch, WholeScratch& whole) const {
    uint8_t* memory = reinterpret_cast<uint8_t*>(scratch);
    memory += -reinterpret_cast<uintptr_t>(memory) % 64;
    whole.queries = memory;
    whole.query_steps = reinterpret_cast<float*>(memory += query_blocks_bytes(queries));
    whole.keys = reinterpret_cast<int8_t*>(memory += lines(4 * queries));
    whole.values = whole.keys + static_cast<size_t>(kTile) * whole_cols_;
    memory += static_cast<size_t>(kTile) * (whole_cols_ + padded_);
    if (whole_cols_ != cache_.head_dim)  // padding of K is multiplied as well
      std::fill_n(whole.keys, static_cast<size_t>(kTile) * whole_cols_, 0);
    for (int i = 0; i < queries; ++i, q += padded_) {
      const int first = i / kWholeRows * kWholeRows, rows = std::min(kWholeRows, queries - first);
      const float inverse = inverse_step(q, padded_, whole.query_steps[i]);
#if BATON_AVX512
      if (whole.few) {
        uint8_t* to = whole.queries + 2 * static_cast<size_t>(i) * padded_;
        whole.query_offsets[i] = pack_query(q, inverse, padded_, padded_, to);
        continue;
      }
#endif
      pack_whole(q, inverse, kWholeZero, whole_cols_, i - first, rows,
                 query_block(whole, i / kWholeRows));
    }
    return reinterpret_cast<float*>(memory);
  }

  uint8_t* query_block(const WholeScratch& whole, int block) const {
    return whole.queries + block * whole_bytes(whole_cols_);
  }

  // Sets `step` to the unit for rounding x [n] to whole numbers, and returns its inverse. n is a
  // multiple of kLanes.
  static float inverse_step(const float* x, int n, float& step) {
    Vec most = zeros();
    for (int d = 0; d < n; d += kLanes) most = max(most, abs(load(x + d)));
    const float largest = max_lanes(most);
    const bool counts = largest > kWholeLeast;
    step = counts ? largest / kWholeMost : 0.0f;
    return counts ? kWholeMost / largest : 0.0f;
  }

  // Reads K of a tile for whole_product, and the sum of each token's elements.
  void read_whole_keys(const Places& places, const Places& next, int8_t* keys,
                       int32_t* sums) const {
    const int words = (cache_.token_bytes + kWord - 1) / kWord;
    alignas(64) uint8_t tails[kLanes][kGroupBytes] = {};
    const uint8_t* tail_rows[kLanes];
    for (int token = 0; token < kTile; token += kLanes) {
      int8_t* to = keys + (static_cast<size_t>(token / kPanel) * whole_cols_ * kPanel +
                           token % kPanel * kWord);
      Words sum = fill_words(0);
      for (int word = 0; word < words; word += kLanes) {
        const int bytes = std::min(kGroupBytes, cache_.token_bytes - word * kWord);
        const uint8_t* const* rows = places.elements + token;
        size_t before = word * kWord;
        if (bytes < kGroupBytes) {  // no byte after the token may be read
          for (int i = 0; i < kLanes; ++i) {
            std::memcpy(tails[i], rows[i] + before, bytes);
            tail_rows[i] = tails[i];
          }
          rows = tail_rows;
          before = 0;
        }
        Vec columns[kLanes];
        transpose(rows, before, columns);
        const auto put = [&](int w) {
          sum = add_bytes(sum, columns[w]);
          store(reinterpret_cast<float*>(to + static_cast<size_t>(word + w) * kWord * kPanel),
                columns[w]);
        };
        if (words - word < kLanes) {
          for (int w = 0; w < words - word; ++w) put(w);
          continue;
        }
#pragma GCC unroll 16
        for (int w = 0; w < kLanes; ++w) {
          next.request(token + w, word * kWord);
          put(w);
        }
      }
      store_words(sums + token, sum);
    }
  }

  void score_whole(int queries, const WholeScratch& whole, const int32_t* key_sums,
                   float* scores) const {
    Words offsets[kTile / kLanes];
    for (int v = 0; v < kTile / kLanes; ++v)
      offsets[v] = shifted_left(load_words(key_sums + v * kLanes), 15);
    for (int first = 0; first < queries; first += kWholeRows) {
      const int rows = std::min(kWholeRows, queries - first);
      for (int panel = 0; panel < kTile / kPanel; ++panel)
        whole_product(query_block(whole, first / kWholeRows), rows,
                      whole.keys + static_cast<size_t>(panel) * whole_cols_ * kPanel, whole_cols_,
                      [&](int r, int v, Words sums) {
                        const int at = panel * kPanelVecs + v;
                        if (kWholeZero > 0) sums = sub(sums, offsets[at]);
                        store(scores + (first + r) * kTile + at * kLanes,
                              mul(from_int32(sums), fill(whole.query_steps[first + r])));
                      });
    }
  }

  // Reads V of a tile for whole_product: [padded / kPanel][kTile / 4][kPanel][4], with `apart`
  // bytes from panel to panel.
  void read_whole_values(const Places& places, const Places& next, int8_t* values,
                         size_t apart) const {
    const int n = cache_.head_dim;
    for (int token = 0; token < kTile; token += 4) {
      for (int t = token; t < token + 4; ++t)
        for (int byte = 0; byte < cache_.token_bytes; byte += 64) next.request(t, byte);
      const uint8_t* const* rows = places.elements + token;
      for (int d = 0; d < n; d += kLanes) {
        int8_t* to = values + d / kPanel * apart + (token * kPanel + d % kPanel * kWord);
        if (d + kLanes <= n) {
          interleave(rows, d, to);
          continue;
        }
        for (int t = 0; t < 4; ++t)  // no byte after the token may be read
          for (int i = d; i < n; ++i) to[(i - d) * kWord + t] = static_cast<int8_t>(rows[t][i]);
      }
    }
  }

  // sums [queries, padded] += weights [queries, kTile] times V.
  void add_whole_values(int queries, const float* weights, const WholeScratch& whole,
                        Partial& p) const {
    alignas(64) uint8_t packed[2 * kWholeRows * kTile];
    float steps[kWholeRows];
    for (int first = 0; first < queries; first += kWholeRows) {
      const int rows = std::min(kWholeRows, queries - first);
      for (int r = 0; r < rows; ++r) {
        const float* row = weights + (first + r) * kTile;
        const float inverse = inverse_step(row, kTile, steps[r]);
        pack_whole(row, inverse, 0, kTile, r, rows, packed);
      }
      for (int panel = 0; panel < padded_ / kPanel; ++panel)
        whole_product(packed, rows, whole.values + static_cast<size_t>(panel) * kTile * kPanel,
                      kTile, [&](int r, int v, Words sums) {
                        float* to = p.sums + static_cast<size_t>(first + r) * padded_ +
                                    panel * kPanel + v * kLanes;
                        store(to, fma(from_int32(sums), fill(steps[r]), load(to)));
                      });
    }
  }

#if BATON_AMX

  static constexpr size_t kValuesApart = 3 * kTile * kPanel;  // bytes between panels of V
  static constexpr int kSums = kLanes * kPanel;               // of sixteen queries and a panel
  static constexpr int kWeighSteps = kTile / 4;
  size_t query_panel_bytes() const { return static_cast<size_t>(whole_cols_) * 2 * kLanes; }
  size_t many_bytes() const {
    const size_t sixteens = (max_queries() + kLanes - 1) / kLanes;
    const size_t panels = padded_ / kPanel;
    return sixteens * (sizeof(SixteenQueries) + query_panel_bytes()) +
           static_cast<size_t>(kTile) * whole_cols_ + panels * kValuesApart +
           sizeof(float) * (kTile * kLanes + panels * 2 * kSums);
  }

  // Rounds the queries [queries, padded] of a task whose first query is at `position`.
  ManyScratch begin_many(const float* q, int queries, int position, float* scratch) const {
    uint8_t* memory = reinterpret_cast<uint8_t*>(scratch);
    memory += -reinterpret_cast<uintptr_t>(memory) % 64;
    const auto take = [&](size_t bytes) { return std::exchange(memory, memory + bytes); };
    const int sixteens = (queries + kLanes - 1) / kLanes;
    ManyScratch many;
    many.sixteens = reinterpret_cast<SixteenQueries*>(take(sixteens * sizeof(SixteenQueries)));
    many.queries = take(sixteens * query_panel_bytes());
    many.keys = take(static_cast<size_t>(kTile) * whole_cols_);
    many.values = reinterpret_cast<int8_t*>(take(padded_ / kPanel * kValuesApart));
    many.scores = reinterpret_cast<float*>(take(sizeof(float) * kTile * kLanes));
    many.sums = reinterpret_cast<int32_t*>(memory);
    std::fill_n(many.values, padded_ / kPanel * kValuesApart, 0);
    alignas(64) uint8_t rounded[kLanes * 2 * kWholeMaxCols];
    for (int i = 0; i < sixteens * kLanes; ++i) {
      SixteenQueries& sixteen = many.sixteens[i / kLanes];
      const int lane = i % kLanes;
      sixteen.ends[lane] = position + std::min(i, queries - 1) / group_ + 1;
      sixteen.peaks[lane] = kMinusInfinity;
      sixteen.totals[lane] = 0;
      sixteen.steps[lane] = 0;
      sixteen.offsets[lane] = 0;
      uint8_t* to = rounded + 2 * static_cast<size_t>(lane) * whole_cols_;
      if (i >= queries || padded_ < whole_cols_) std::fill_n(to, 2 * whole_cols_, 0);
      if (i < queries) {
        const float* x = q + static_cast<size_t>(i) * padded_;
        const float inverse = inverse_step(x, padded_, sixteen.steps[lane]);
        sixteen.offsets[lane] = pack_query(x, inverse, padded_, whole_cols_, to);
      }
      if (lane == kLanes - 1)
        pack_sixteen(rounded, whole_cols_, many.queries + i / kLanes * query_panel_bytes());
    }
    return many;
  }

  // Computes a task with many queries over int8 KV. The bits equal those of the other functions.
  void walk_many(const Batch& batch, const Task& task, int layer, const Scoring& scoring,
                 const float* q, int end, int oldest, int partition, Partial& p,
                 float* scratch) const {
    const int queries = task.count * group_;
    const int sixteens = (queries + kLanes - 1) / kLanes;
    const ManyScratch many = begin_many(q, queries, end - task.count, scratch);
    const int begin = std::max(partition * kPartition, oldest / kTile * kTile);
    const int stop = std::min((partition + 1) * kPartition, end);
    const int32_t* table = batch.block_tables + static_cast<size_t>(task.row) * batch.max_blocks;
    alignas(64) float key_scales[kTile], value_scales[kTile];
    alignas(64) int32_t products[2][2 * kSums];
    SixteenWeights<kTile> weights[2];
    Places keys_at[2], values_at[2];  // of this tile and the next
    find_tile(table, layer, task.head, begin, end, keys_at[0], values_at[0]);
    // The work of AMX in one step of computing weights of the i-th sixteen queries: multiplies K
    // for the next sixteen, V for the last sixteen. Sums are stored one step after their product,
    // because storing takes equally long.
    const auto multiply = [&](int i, int step) {
      if (step < 2) {
        if (i + 1 >= sixteens) return;
        const uint8_t* panel = many.queries + (i + 1) * query_panel_bytes();
        if (step == 0) amx_multiply<2, false>(many.keys, panel, whole_cols_, false, [](int) {});
        else amx_store<2>(products[(i + 1) % 2]);
        return;
      }
      const int parts = i > 0 ? 2 * (padded_ / kPanel) : 0;
      const int stop = (step - 1) * parts / (kWeighSteps - 2);
      for (int part = (step - 2) * parts / (kWeighSteps - 2); part < stop; ++part) {
        if (part % 2 == 0) multiply_values(weights[(i - 1) % 2], many, part / 2);
        else amx_store<2>(many.sums + part / 2 * 2 * kSums);
      }
    };
    for (int tile = begin; tile < stop; tile += kTile) {
      const int now = (tile - begin) / kTile % 2;
      const int later = tile + kTile < stop ? tile + kTile : tile;  // to prefetch meanwhile
      find_tile(table, layer, task.head, later, end, keys_at[1 - now], values_at[1 - now]);
      read_scales(keys_at[now], key_scales);
      read_scales(values_at[now], value_scales);
      read_many_keys(keys_at[now], keys_at[1 - now], many.keys);
      read_whole_values(values_at[now], values_at[1 - now], many.values + kTile * kPanel,
                        kValuesApart);
      for (int i = -1; i <= sixteens; ++i) {
        const auto beside = [&](int step) { multiply(i, step); };
        if (i >= 0 && i < sixteens)
          weigh_many(scoring, tile, key_scales, value_scales, products[i % 2], many.scores,
                     many.sixteens[i], weights[i % 2], beside);
        else
          for (int step = 0; step < kWeighSteps; ++step) beside(step);
        if (i > 0) {
          const int first = (i - 1) * kLanes;
          add_many_values(std::min(kLanes, queries - first), weights[(i - 1) % 2], many.sums,
                          p.sums + static_cast<size_t>(first) * padded_);
        }
      }
    }
    for (int i = 0; i < queries; ++i) {
      p.peaks[i] = many.sixteens[i / kLanes].peaks[i % kLanes];
      p.totals[i] = many.sixteens[i / kLanes].totals[i % kLanes];
    }
  }

  // Multiplies the lower bytes of numbers by V, and the upper bytes by the zeros behind V; then the
  // reverse.
  static void multiply_values(const SixteenWeights<kTile>& weights, const ManyScratch& many,
                              int panel) {
    const uint8_t* values = reinterpret_cast<const uint8_t*>(many.values) + panel * kValuesApart;
    amx_multiply_by_two(weights.numbers[0], values + kTile * kPanel, values);
  }

  // Reads K of a tile, in the form of amx_multiply: rows of unsigned bytes.
  void read_many_keys(const Places& places, const Places& next, uint8_t* keys) const {
    const int n = cache_.token_bytes;
    const Words zero = _mm512_set1_epi8(static_cast<char>(kKeyZero));
    for (int t = 0; t < kTile; ++t) {
      uint8_t* to = keys + t / kAmxRows * kAmxRows * whole_cols_ + t % kAmxRows * kAmxInputs;
      for (int byte = 0; byte < n; byte += kAmxInputs, to += kAmxRows * kAmxInputs) {
        next.request(t, byte);
        const uint8_t* from = places.elements[t] + byte;
        const __mmask64 present = n - byte < kAmxInputs ? (__mmask64{1} << (n - byte)) - 1 : ~0ull;
        store_words(to, bits_xor(_mm512_maskz_loadu_epi8(present, from), zero));
      }
    }
  }

  // Computes weights from the products of K and sixteen queries [kTile][lower and upper bytes][16].
  // Calls beside(step) for work that AMX does meanwhile.
  template <class Beside>
  [[gnu::noinline]] static void weigh_many(const Scoring& scoring, int tile,
                                           const float* key_scales, const float* value_scales,
                                           const int32_t* products, float* scores,
                                           SixteenQueries& queries, SixteenWeights<kTile>& to,
                                           Beside beside) {
    const Vec step = load(queries.steps), scaling = fill(scoring.scaling);
    const Words offset = load_words(queries.offsets), end = load_words(queries.ends);
    const int window = scoring.window > 0 ? scoring.window : std::numeric_limits<int>::max();
    const Words beyond = sub(end, fill_words(tile));  // this token and later tokens are hidden
    const bool hides = (_mm512_cmplt_epi32_mask(beyond, fill_words(kTile)) |
                        _mm512_cmpgt_epi32_mask(beyond, fill_words(window))) != 0;
    const Vec old = load(queries.peaks);
    Vec most[2] = {old, old};
#pragma GCC unroll 4
    for (int t = 0; t < kTile; ++t) {
      const int32_t* sums = products + 2 * t * kLanes;
      const Words high = shifted_left(load_words(sums + kLanes), 8);
      const Words sum = add(add(load_words(sums), offset), high);
      Vec score = mul(mul(mul(from_int32(sum), step), scaling), fill(key_scales[t]));
      if (scoring.softcap > 0)
        score = mul(fill(scoring.softcap), tanh(div(score, fill(scoring.softcap))));
      if (hides) {
        const Words after = sub(beyond, fill_words(t));
        const __mmask16 seen = _mm512_cmpgt_epi32_mask(after, fill_words(0)) &
                               _mm512_cmple_epi32_mask(after, fill_words(window));
        score = _mm512_mask_blend_ps(seen, fill(kMinusInfinity), score);
      }
      store(scores + t * kLanes, score);
      most[t % 2] = max(most[t % 2], score);
    }
    const Vec peak = max(most[0], most[1]);
    // Possibly no token was visible so far.
    const Vec origin = where_less(fill(kMinusInfinity), peak, peak, zeros());
    const Vec fade = exp(sub(old, origin));
    Vec largest = zeros();
    Vec parts[kWeighSteps];  // sums in the order of sum_lanes
#pragma GCC unroll 1
    for (int i = 0; i < kWeighSteps; ++i) {
      Vec four[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int t = i + j * kWeighSteps;
        four[j] = exp(sub(load(scores + t * kLanes), origin));
        const Vec weight = mul(four[j], fill(value_scales[t]));
        largest = max(largest, weight);
        store(scores + t * kLanes, weight);
      }
      parts[i] = add(add(four[0], four[2]), add(four[1], four[3]));
      beside(i);
    }
    const Vec fours[4] = {add(parts[0], parts[4]), add(parts[1], parts[5]), add(parts[2], parts[6]),
                          add(parts[3], parts[7])};
    const Vec total = add(add(fours[0], fours[2]), add(fours[1], fours[3]));
    store(queries.totals, fma(load(queries.totals), fade, total));
    store(queries.peaks, peak);
    store(to.fades, fade);
    const Vec least = fill(kWholeLeast), number = fill(kWholeMost);
    store(to.steps, where_less(least, largest, div(largest, number), zeros()));
    pack_weights<kTile>(scores, where_less(least, largest, div(number, largest), zeros()),
                        to.numbers[0]);
  }

  // sums [queries, padded] = fades * sums + weights times V.
  void add_many_values(int queries, const SixteenWeights<kTile>& weights, const int32_t* products,
                       float* sums) const {
    for (int r = 0; r < queries; ++r) {
      const Vec step = fill(weights.steps[r]), fade = fill(weights.fades[r]);
      for (int panel = 0; panel < padded_ / kPanel; ++panel)
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVecs; ++v, sums += kLanes) {
          const int32_t* low = products + 2 * panel * kSums + r * kPanel + v * kLanes;
          const Words sum = add(load_words(low), shifted_left(load_words(low + kSums), 8));
          store(sums, fma(from_int32(sum), step, mul(load(sums), fade)));
        }
    }
  }

#endif

  BATON_INLINE void read_scales(const Places& places, float* scales) const {
    for (int t = 0; t < kTile; t += kLanes) {
      if (places.scales[t + kLanes - 1] == places.scales[t] + 4 * (kLanes - 1)) {  // of one block
        store(scales + t, load(reinterpret_cast<const float*>(places.scales[t])));
        continue;
      }
      for (int i = t; i < t + kLanes; ++i) scales[i] = load_float(places.scales[i]);
    }
  }

  Cache cache_;
  int group_;
  int padded_;
  int tokens_per_task_;
  bool is_whole_;  // int8 KV is multiplied as whole numbers
  bool uses_amx_ = false;
  bool are_few_;    // so that few queries read it sixteen tokens at a time
  int whole_cols_;  // head_dim, padded for whole_product
  int num_parts_ = 0;
  std::vector<uint8_t> nothing_;  // a token of zeros, and its scale
  int threads_ = 1;
  std::vector<Task> tasks_;
  std::vector<float> parts_;
};

}  // namespace baton
