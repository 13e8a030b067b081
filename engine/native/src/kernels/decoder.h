// The whole forward pass of a Llama-like decoder as one job of a team.
//
// It covers RMSNorm (before, and optionally after, attention and feed-forward), optional bias,
// norms of queries and keys per head, rotary embeddings of all or part of a head, grouped queries,
// windows, soft caps, and gated feed-forward layers: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma 1-3.
// A layer has seven to ten phases with barriers between them. Within a phase the threads share rows
// or columns, which changes no bit of a result.
#pragma once

#include <cstdlib>
#include <memory>

#include "attention.h"

namespace baton {

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// Mirrored in structs.py, as are the following two.
struct Layer {
  Weight qkv[3];  // one matrix for all three, or one for each
  Weight output;
  Weight gate;
  Weight up;
  Weight down;
  const float* input_norm;
  const float* query_norm;           // [head_dim] or null
  const float* key_norm;             // [head_dim] or null
  const float* post_attention_norm;  // norm of attention's output; or null
  const float* feed_forward_norm;
  const float* post_feed_forward_norm;  // norm of the feed-forward layer's output; or null
  Scoring scoring;
  int32_t rope;  // index of the layer's rope in the model
  int32_t num_qkv;
};

struct Rope {
  const float* inverse_frequencies;  // [rotary_dim / 2]
  float scale;
  int32_t rotary_dim;
};

struct Model {
  const Layer* layers;
  const Rope* ropes;
  const void* embedding;  // [vocab, hidden], fp32 or bf16
  const float* final_norm;
  Weight head;
  int32_t num_layers;
  int32_t num_ropes;
  int32_t hidden;
  int32_t num_heads;
  int32_t feed_forward;
  int32_t embedding_kind;
  int32_t activation;
  float epsilon;
  float embedding_scale;
  float logit_softcap;  // 0: none
};

// The rows of a pass. The tokens of each row extend one sequence. Mirrored in structs.py.
struct Ragged {
  const int64_t* token_ids;   // row by row
  const int32_t* lens;        // [num_rows]: tokens of each row
  const int32_t* ends;        // [num_rows]: context length after the row
  const int32_t* tables;      // block tables, row by row
  const int32_t* table_lens;  // [num_rows]: number of blocks; at least as many as `ends` needs
  int32_t num_rows;
  int32_t unused;
  const int64_t* origins;  // [num_rows]: added to positions before they are embedded; null: zero
};

// The wanted results of a pass; mirrored in structs.py.
struct Wanted {
  const int64_t* keep;  // [num_keep]: tokens of the flat batch whose logits are wanted
  float* logits;        // [num_keep, vocab]
  int32_t num_keep;
  int32_t unused;
};

// Rows in the form that attention reads, and the position of each token.
class Laid {
 public:
  void lay(const Ragged& rows, int block_size) {
    starts_.assign(1, 0);
    positions_.clear();
    slots_.clear();
    const int widest = *std::max_element(rows.table_lens, rows.table_lens + rows.num_rows);
    tables_.assign(static_cast<size_t>(rows.num_rows) * widest, 0);
    const int32_t* table = rows.tables;
    for (int r = 0; r < rows.num_rows; table += rows.table_lens[r++]) {
      std::copy_n(table, rows.table_lens[r], tables_.begin() + static_cast<size_t>(r) * widest);
      starts_.push_back(starts_.back() + rows.lens[r]);
      const int64_t origin = rows.origins ? rows.origins[r] : 0;
      for (int64_t position = rows.ends[r] - rows.lens[r]; position < rows.ends[r]; ++position) {
        positions_.push_back(origin + position);
        slots_.push_back(table[position / block_size] * static_cast<int64_t>(block_size) +
                         position % block_size);
      }
    }
    batch_ = {starts_.data(), rows.ends,      tables_.data(), slots_.data(),
              rows.num_rows,  starts_.back(), widest,         0};
  }

  const Batch& batch() const { return batch_; }
  const int64_t* positions() const { return positions_.data(); }

 private:
  Batch batch_;
  std::vector<int32_t> starts_, tables_;
  std::vector<int64_t> positions_, slots_;
};

// Memory that can grow but never shrinks. It starts on a cache line. Growth discards its contents.
class Buffer {
 public:
  ~Buffer() { std::free(memory_); }
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(memory_);
    bytes_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    memory_ = std::aligned_alloc(4096, bytes_);
    if (memory_ == nullptr) std::abort();
  }
  float* floats() const { return static_cast<float*>(memory_); }
  uint8_t* bytes() const { return static_cast<uint8_t*>(memory_); }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

inline size_t whole_vecs(size_t floats) { return (floats + kLanes - 1) / kLanes * kLanes; }

BATON_INLINE Vec activate(Vec x, int32_t kind) {
  if (kind == kSilu) return div(x, add(fill(1.0f), exp(sub(zeros(), x))));
  if (kind == kGeluTanh) {
    const Vec cube = mul(mul(x, x), x);
    const Vec inner = mul(fill(0.7978845608028654f), fma(fill(0.044715f), cube, x));
    return mul(mul(fill(0.5f), x), add(fill(1.0f), tanh(inner)));
  }
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678118654752f));
  return load(lanes);
}

BATON_INLINE void rms_norm(const float* x, const float* weight, int n, float epsilon, float* y) {
  Vec squares = zeros();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float sum = sum_lanes(squares);
  for (; i < n; ++i) sum = std::fma(x[i], x[i], sum);
  const float factor = 1.0f / std::sqrt(sum / n + epsilon);
  for (i = 0; i + kLanes <= n; i += kLanes)
    store(y + i, mul(mul(load(x + i), fill(factor)), load(weight + i)));
  for (; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

// Adds the bias of a matrix if the matrix has one.
BATON_INLINE void add_bias(const Weight& w, int panel, TileRow& tile) {
  if (w.bias == nullptr) return;
  for (int v = 0; v < kPanelVecs; ++v)
    tile.vecs[v] = add(tile.vecs[v], load(w.bias + panel * kPanel + v * kLanes));
}

// Consumers of linear_tiles: y = tile + bias, y += tile + bias.
struct Store {
  float* to;
  size_t stride;
  const Weight* w;
  float softcap = 0;

  BATON_INLINE void operator()(int row, int panel, TileRow* tile) const {
    add_bias(*w, panel, *tile);
    const int columns = panel_columns(*w, panel);
    float* y = to + row * stride + panel * kPanel;
    if (columns == kPanel) {
      store_row(y, *tile);
    } else {
      alignas(64) float x[kPanel];
      store_row(x, *tile);
      std::memcpy(y, x, sizeof(float) * columns);
    }
    for (int c = 0; softcap > 0 && c < columns; ++c) y[c] = softcap * std::tanh(y[c] / softcap);
  }
};

struct Add {
  float* to;
  size_t stride;
  const Weight* w;

  BATON_INLINE void operator()(int row, int panel, TileRow* tile) const {
    add_bias(*w, panel, *tile);
    const int columns = panel_columns(*w, panel);
    float* y = to + row * stride + panel * kPanel;
    if (columns == kPanel) {
      for (int v = 0; v < kPanelVecs; ++v)
        store(y + v * kLanes, add(load(y + v * kLanes), tile->vecs[v]));
    } else {
      alignas(64) float x[kPanel];
      store_row(x, *tile);
      for (int c = 0; c < columns; ++c) y[c] += x[c];
    }
  }
};

class Decoder {
 public:
  Decoder(Team& team, const Model& model, const Cache& cache)
      : team_(team), m_(model), cache_(cache),
        attention_(cache, model.num_heads / cache.num_kv_heads),
        query_size_(model.num_heads * cache.head_dim),
        kv_size_(cache.num_kv_heads * cache.head_dim) {}

  void forward(const Ragged& rows, const Wanted& wanted) {
    laid_.lay(rows, cache_.block_size);
    batch_ = &laid_.batch();
    token_ids_ = rows.token_ids;
    wanted_ = &wanted;
    attention_.plan(*batch_, team_.size());
    reserve();
    team_.run([](void* self, int thread) { static_cast<Decoder*>(self)->work(thread); }, this);
  }

  Team& team() { return team_; }
  int vocab() const { return m_.head.rows; }

 private:
  void reserve() {
    const size_t tokens = std::max(batch_->num_tokens, wanted_->num_keep);
    hidden_stride_ = whole_vecs(m_.hidden);
    qkv_stride_ = whole_vecs(query_size_ + 2 * kv_size_);
    attended_stride_ = whole_vecs(query_size_);
    wide_stride_ = whole_vecs(m_.feed_forward + kPanel);
    residual_.reserve(tokens * hidden_stride_ * 4);
    added_.reserve(tokens * hidden_stride_ * 4);
    qkv_.reserve(tokens * qkv_stride_ * 4);
    attended_.reserve(tokens * attended_stride_ * 4);
    wide_.reserve(tokens * wide_stride_ * 4);
    size_t packed = packed_row_bytes(m_.head, wanted_->num_keep);
    for (int i = 0; i < m_.num_layers; ++i)
      for (const Weight* w :
           {&m_.layers[i].qkv[0], &m_.layers[i].output, &m_.layers[i].gate, &m_.layers[i].down})
        packed = std::max(packed, packed_row_bytes(*w, batch_->num_tokens));
    packed_.reserve(packed);
    scales_.reserve(tokens * 4);
    rotary_floats_ = 0;
    for (int i = 0; i < m_.num_ropes; ++i) rotary_floats_ += m_.ropes[i].rotary_dim;
    rotary_.reserve(tokens * rotary_floats_ * 4);
    size_t most = std::max(attention_.scratch_floats(), kBlockRows * hidden_stride_);
    most = std::max(most, linear_floats(m_.head, wanted_->num_keep, 1));
    for (int i = 0; i < m_.num_layers; ++i) {
      const Layer& layer = m_.layers[i];
      for (const Weight* w : {&layer.qkv[0], &layer.output, &layer.down})
        most = std::max(most, linear_floats(*w, batch_->num_tokens, 1));
      most = std::max(most, linear_floats(layer.gate, batch_->num_tokens, 2));
    }
    scratch_stride_ = whole_vecs(most);
    scratch_.reserve(scratch_stride_ * team_.size() * 4);
  }

  float* scratch(int thread) { return scratch_.floats() + thread * scratch_stride_; }

  void work(int thread) {
    const int tokens = batch_->num_tokens;
    const Share mine(tokens, thread, team_.size());
    for (int t = mine.begin; t < mine.end; ++t) {
      embed(t);
      rotations(t);
    }
    for (int i = 0; i < m_.num_layers; ++i) {
      attention_layer(m_.layers[i], i, thread, mine);
      feed_forward_layer(m_.layers[i], thread, mine);
    }
    head(thread);
  }

  void embed(int t) {
    float* x = residual_.floats() + t * hidden_stride_;
    const size_t at = token_ids_[t] * static_cast<size_t>(m_.hidden);
    for (int i = 0; i < m_.hidden; ++i)
      x[i] = m_.embedding_scale *
             (m_.embedding_kind == kBf16
                  ? bf16_to_float(static_cast<const uint16_t*>(m_.embedding)[at + i])
                  : static_cast<const float*>(m_.embedding)[at + i]);
  }

  // The cosines, then the sines, of the token's position, for each rope.
  void rotations(int t) {
    float* to = rotary_.floats() + t * rotary_floats_;
    const float position = static_cast<float>(laid_.positions()[t]);
    for (int r = 0; r < m_.num_ropes; ++r) {
      const Rope& rope = m_.ropes[r];
      const int half = rope.rotary_dim / 2;
      for (int i = 0; i < half; ++i) {
        const float angle = position * rope.inverse_frequencies[i];
        to[i] = std::cos(angle) * rope.scale;
        to[half + i] = std::sin(angle) * rope.scale;
      }
      to += rope.rotary_dim;
    }
  }

  void attention_layer(const Layer& layer, int index, int thread, Share mine) {
    normalise(layer.input_norm, layer.qkv[0], thread, mine);
    team_.barrier();
    project_qkv(layer, thread);
    team_.barrier();
    for (int t = mine.begin; t < mine.end; ++t) rotate_and_write(layer, index, t);
    if (thread == 0) team_.next_task.store(0, std::memory_order_relaxed);
    team_.barrier();
    for (;;) {
      const int task = team_.next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= attention_.num_tasks()) break;
      attention_.run(task, *batch_, index, layer.scoring, qkv_.floats(), qkv_stride_,
                     attended_.floats(), attended_stride_, scratch(thread));
    }
    team_.barrier();
    if (attention_.has_parts()) {
      attention_.join(*batch_, thread, team_.size(), attended_.floats(), attended_stride_,
                      scratch(thread));
      team_.barrier();
    }
    project(layer.output, layer.post_attention_norm, attended_.floats(), attended_stride_, thread,
            mine);
  }

  // Computes queries, keys and values in one row. The threads share the panels of all matrices.
  void project_qkv(const Layer& layer, int thread) {
    int panels = 0;
    for (int i = 0; i < layer.num_qkv; ++i) panels += layer.qkv[i].num_panels();
    const Share all(panels, thread, team_.size());
    float* to = qkv_.floats();
    for (int i = 0, before = 0; i < layer.num_qkv; ++i) {
      const Weight* w = &layer.qkv[i];
      Share share = all;
      share.begin = std::clamp(all.begin - before, 0, w->num_panels());
      share.end = std::clamp(all.end - before, 0, w->num_panels());
      linear_tiles<1>(&w, packed(), batch_->num_tokens, share, scratch(thread),
                      Store{to, qkv_stride_, w});
      before += w->num_panels();
      to += w->rows;
    }
  }

  void feed_forward_layer(const Layer& layer, int thread, Share mine) {
    normalise(layer.feed_forward_norm, layer.gate, thread, mine);
    team_.barrier();
    float* wide = wide_.floats();
    const Weight* weights[] = {&layer.gate, &layer.up};
    linear_tiles<2>(
        weights, packed(), batch_->num_tokens, Share(layer.gate.num_panels(), thread, team_.size()),
        scratch(thread), [&](int row, int panel, TileRow* tiles) {
          add_bias(layer.gate, panel, tiles[0]);
          add_bias(layer.up, panel, tiles[1]);
          float* y = wide + row * wide_stride_ + panel * kPanel;
          for (int v = 0; v < kPanelVecs; ++v)
            store(y + v * kLanes, mul(activate(tiles[0].vecs[v], m_.activation), tiles[1].vecs[v]));
        });
    team_.barrier();
    project(layer.down, layer.post_feed_forward_norm, wide, wide_stride_, thread, mine);
  }

  // residual += w x, or the norm of w x.
  void project(const Weight& w, const float* norm, const float* x, size_t stride, int thread,
               Share mine) {
    const int tokens = batch_->num_tokens;
    pack_rows(w, mine, tokens, packed(), [&](int t, int) { return x + t * stride; });
    team_.barrier();
    if (norm == nullptr) {
      linear(w, tokens, thread, Add{residual_.floats(), hidden_stride_, &w});
      team_.barrier();
      return;
    }
    linear(w, tokens, thread, Store{added_.floats(), hidden_stride_, &w});
    team_.barrier();
    for (int t = mine.begin; t < mine.end; ++t) {
      float* y = added_.floats() + t * hidden_stride_;
      float* sum = residual_.floats() + t * hidden_stride_;
      rms_norm(y, norm, m_.hidden, m_.epsilon, y);
      for (int i = 0; i < m_.hidden; ++i) sum[i] += y[i];
    }
    team_.barrier();  // the head divides its rows differently
  }

  void head(int thread) {
    const int rows = wanted_->num_keep;
    pack_rows(m_.head, Share(rows, thread, team_.size()), rows, packed(), [&](int i, int slot) {
      return normalised(wanted_->keep[i], m_.final_norm, thread, slot);
    });
    team_.barrier();
    linear(m_.head, rows, thread,
           Store{wanted_->logits, static_cast<size_t>(m_.head.rows), &m_.head, m_.logit_softcap});
  }

  // Packs normalised rows of the residual stream, for products with `w`.
  void normalise(const float* norm, const Weight& w, int thread, Share mine) {
    pack_rows(w, mine, batch_->num_tokens, packed(),
              [&](int t, int slot) { return normalised(t, norm, thread, slot); });
  }

  const float* normalised(int64_t t, const float* norm, int thread, int slot) {
    float* y = scratch(thread) + slot * hidden_stride_;
    rms_norm(residual_.floats() + t * hidden_stride_, norm, m_.hidden, m_.epsilon, y);
    return y;
  }

  Rows packed() const { return {packed_.floats(), packed_.bytes(), scales_.floats()}; }

  template <class Consume>
  void linear(const Weight& w, int rows, int thread, Consume consume) {
    linear_tiles(w, packed(), rows, thread, team_.size(), scratch(thread), consume);
  }

  void rotate_and_write(const Layer& layer, int index, int t) {
    float* row = qkv_.floats() + t * qkv_stride_;
    const Rope& rope = m_.ropes[layer.rope];
    const float* turn = rotary_.floats() + t * rotary_floats_;
    for (int r = 0; r < layer.rope; ++r) turn += m_.ropes[r].rotary_dim;
    const int n = cache_.head_dim, heads = m_.num_heads, kv_heads = cache_.num_kv_heads;
    for (int h = 0; h < heads + kv_heads; ++h) {
      float* x = row + h * n;
      const float* norm = h < heads ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(x, norm, n, m_.epsilon, x);
      rotate(x, turn, rope.rotary_dim / 2);
    }
    const int64_t slot = batch_->slot_mapping[t];
    const int64_t block = slot / cache_.block_size;
    const int offset = static_cast<int>(slot % cache_.block_size);
    for (int h = 0; h < 2 * kv_heads; ++h)
      write_token(cache_, place(cache_, index, h, block, offset), row + (heads + h) * n);
  }

  static void rotate(float* x, const float* turn, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const Vec a = load(x + i), b = load(x + half + i);
      const Vec cosine = load(turn + i), sine = load(turn + half + i);
      store(x + i, sub(mul(a, cosine), mul(b, sine)));
      store(x + half + i, add(mul(b, cosine), mul(a, sine)));
    }
    for (; i < half; ++i) {
      const float a = x[i], b = x[half + i], cosine = turn[i], sine = turn[half + i];
      x[i] = a * cosine - b * sine;
      x[half + i] = b * cosine + a * sine;
    }
  }

  Team& team_;
  Model m_;
  Cache cache_;
  Attention attention_;
  int query_size_, kv_size_;
  Laid laid_;  // the present pass, with the next three fields
  const Batch* batch_ = nullptr;
  const int64_t* token_ids_ = nullptr;
  const Wanted* wanted_ = nullptr;
  size_t hidden_stride_ = 0, qkv_stride_ = 0, attended_stride_ = 0, wide_stride_ = 0;
  size_t rotary_floats_ = 0, scratch_stride_ = 0;
  Buffer residual_, added_, qkv_, attended_, wide_, packed_, scales_, rotary_, scratch_;
};

}  // namespace baton
