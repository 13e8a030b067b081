// The functions that Python calls through ctypes: see library.py. Each function runs on the
// caller's thread and the threads of its team. A team serves one caller at a time.
#include "decoder.h"
#include "sampling.h"
#include "speculate.h"

using namespace baton;

extern "C" {

int32_t baton_panel() { return kPanel; }
int32_t baton_is_avx512() { return BATON_AVX512; }
// Switches AMX on or off. Returns 1 if AMX is then used. Products with matrices that are already
// packed keep their bits. Only bf16 in pairs needs AMX.
int32_t baton_use_amx(int32_t wanted) { return amx_is_used = wanted && amx_is_lent; }
int32_t baton_uses_amx() { return amx_is_used; }

void* baton_team_open(int32_t threads) { return new Team(threads); }
void baton_team_close(void* team) { delete static_cast<Team*>(team); }

int64_t baton_packed_bytes(int32_t kind, int32_t rows, int32_t cols) {
  return static_cast<int64_t>(packed_bytes(kind, rows, cols));
}
int32_t baton_padded_cols(int32_t kind, int32_t cols) { return padded_cols(kind, cols); }

void baton_pack(int32_t kind, const float* source, int32_t rows, int32_t cols, void* panels,
                float* scales, int32_t* offsets) {
  pack(kind, source, rows, cols, panels, scales, offsets);
}

// y [rows, w.rows] = x [rows, w.cols] w^T + bias, all contiguous. `scratch` has at least
// baton_linear_scratch bytes.
int64_t baton_linear_scratch(void* team, const Weight* w, int32_t rows) {
  const int64_t threads = static_cast<Team*>(team)->size();
  const int64_t packed = packed_row_bytes(*w, rows) / 4 + rows + 2 * kLanes;
  return 4 * (threads * static_cast<int64_t>(linear_floats(*w, rows, 1)) + packed);
}

void baton_linear(void* team_, const Weight* w, const float* x, int32_t rows, float* y,
                  void* scratch) {
  Team& team = *static_cast<Team*>(team_);
  struct Job {
    Team& team;
    const Weight& w;
    const float* x;
    float* y;
    int32_t rows;
    float* threads_scratch;
    Rows packed;
  } job{team, *w, x, y, rows, static_cast<float*>(scratch), {}};
  job.packed.values = job.threads_scratch + linear_floats(*w, rows, 1) * team.size();
  job.packed.bytes = reinterpret_cast<uint8_t*>(job.packed.values);
  job.packed.scales = job.packed.values + packed_row_bytes(*w, rows) / 4 + kLanes;
  team.run(
      [](void* context, int thread) {
        const Job& j = *static_cast<Job*>(context);
        const int threads = j.team.size();
        const Share mine(j.rows, thread, threads);
        pack_rows(j.w, mine, j.rows, j.packed,
                  [&](int t, int) { return j.x + static_cast<size_t>(t) * j.w.cols; });
        j.team.barrier();
        linear_tiles(j.w, j.packed, j.rows, thread, threads,
                     j.threads_scratch + thread * linear_floats(j.w, j.rows, 1),
                     Store{j.y, static_cast<size_t>(j.w.rows), &j.w});
      },
      &job);
}

// Writes K and V [num_tokens, num_kv_heads, head_dim] and attends with query [num_tokens, num_heads,
// head_dim]; out is like query. All contiguous.
void baton_attend(void* team_, const Cache* cache, const Batch* batch, int32_t layer,
                  const Scoring* scoring, int32_t num_heads, const float* query, const float* key,
                  const float* value, float* out) {
  Team& team = *static_cast<Team*>(team_);
  struct Job {
    Team* team;
    const Cache* cache;
    const Batch* batch;
    int32_t layer;
    const Scoring* scoring;
    const float *query, *key, *value;
    float* out;
    size_t stride;
    Attention attention;
    std::vector<float> scratch;
  } job{&team,
        cache,
        batch,
        layer,
        scoring,
        query,
        key,
        value,
        out,
        static_cast<size_t>(num_heads) * cache->head_dim,
        Attention(*cache, num_heads / cache->num_kv_heads),
        {}};
  job.attention.plan(*batch, team.size());
  const size_t scratch = job.attention.scratch_floats();
  job.scratch.resize(scratch * team.size());
  team.next_task.store(0);
  team.run(
      [](void* context, int thread) {
        Job& j = *static_cast<Job*>(context);
        const Cache& c = *j.cache;
        const Share mine(j.batch->num_tokens, thread, j.team->size());
        for (int t = mine.begin; t < mine.end; ++t)
          for (int h = 0; h < 2 * c.num_kv_heads; ++h) {
            const int64_t slot = j.batch->slot_mapping[t];
            const bool is_key = h < c.num_kv_heads;
            const int head = is_key ? h : h - c.num_kv_heads;
            const float* x = (is_key ? j.key : j.value) +
                             (static_cast<size_t>(t) * c.num_kv_heads + head) * c.head_dim;
            write_token(
                c, place(c, j.layer, h, slot / c.block_size, static_cast<int>(slot % c.block_size)),
                x);
          }
        j.team->barrier();
        float* scratch = j.scratch.data() + thread * (j.scratch.size() / j.team->size());
        for (;;) {
          const int task = j.team->next_task.fetch_add(1, std::memory_order_relaxed);
          if (task >= j.attention.num_tasks()) break;
          j.attention.run(task, *j.batch, j.layer, *j.scoring, j.query, j.stride, j.out, j.stride,
                          scratch);
        }
        j.team->barrier();
        if (j.attention.has_parts())
          j.attention.join(*j.batch, thread, j.team->size(), j.out, j.stride, scratch);
      },
      &job);
}

void* baton_decoder_open(void* team, const Model* model, const Cache* cache) {
  return new Decoder(*static_cast<Team*>(team), *model, *cache);
}
void baton_decoder_close(void* decoder) { delete static_cast<Decoder*>(decoder); }
void baton_decoder_forward(void* decoder, const Ragged* rows, const Wanted* wanted) {
  static_cast<Decoder*>(decoder)->forward(*rows, *wanted);
}

// The next three functions return 1, or 0 if a draw names an id outside the vocabulary.
int32_t baton_decoder_draft(void* decoder, const Ragged* rows, float* logits,
                            const Proposals* proposals) {
  return Drafter(*static_cast<Decoder*>(decoder), *rows, logits, *proposals).run();
}
int32_t baton_decoder_verify(void* decoder, const Ragged* rows, float* logits, Choices* choices) {
  return Verifier(*static_cast<Decoder*>(decoder), *rows, logits, *choices).run();
}
// Lets the draft model propose tokens, then verifies them.
int32_t baton_decoder_speculate(void* decoder, const Ragged* rows, float* logits, Choices* choices,
                                void* draft, const Ragged* seen, Drafting* drafting) {
  return propose(*static_cast<Decoder*>(draft), *seen, *drafting, *choices, rows->num_rows) &&
         Verifier(*static_cast<Decoder*>(decoder), *rows, logits, *choices).run();
}

// Chooses a token for each row of logits [num_rows, vocab]. Returns 0 if a draw names an id outside
// the vocabulary, else 1.
int32_t baton_sample(void* team_, const float* logits, int32_t vocab, int32_t num_rows,
                     const Draw* draws, int64_t* tokens) {
  Team& team = *static_cast<Team*>(team_);
  struct Job {
    Team& team;
    const float* logits;
    int32_t vocab, num_rows;
    const Draw* draws;
    int64_t* tokens;
  } job{team, logits, vocab, num_rows, draws, tokens};
  team.next_task.store(0);
  team.run(
      [](void* context, int) {
        const Job& j = *static_cast<Job*>(context);
        Sampler sampler(j.vocab);
        for (;;) {
          const int row = j.team.next_task.fetch_add(1, std::memory_order_relaxed);
          if (row >= j.num_rows) break;
          j.tokens[row] =
              sampler.choose(j.logits + static_cast<size_t>(row) * j.vocab, j.draws[row]);
        }
      },
      &job);
  return std::none_of(tokens, tokens + num_rows, [](int64_t token) { return token < 0; });
}

}  // extern "C"
