// A decoding step in one call: all passes of a draft model, the target's pass, and its choices.
#pragma once

#include <chrono>

#include "decoder.h"
#include "sampling.h"

namespace baton {

// Mirrored in structs.py, as are the following two.
struct Proposals {
  const int32_t* counts;  // [num_rows]: tokens that each row proposes, in falling order
  const Draw* draws;      // [num_rows]: the way in which the row chooses its first token
  int32_t* token_ids;     // [num_rows, counts[0]]
  int32_t num_rows;       // number of rows that propose; they are first in the first pass
  int32_t unused;
};

struct Choices {
  const int32_t* counts;  // [num_rows]: tokens that each row chooses: one for each proposed
                          // token, and one behind them; or none
  const int32_t* scored;  // [num_rows]: the row's first tokens whose logits are wanted too
  const Draw* draws;      // of the rows that choose: how they choose the first token
  int32_t* proposed;      // row by row
  int64_t* token_ids;     // row by row: the choices
  double forward_s;       // output: time of the pass
};

// The rows of a verification for which a draft model first proposes tokens.
struct Drafting {
  const int32_t* rows;    // [num_rows]: their indices, in the draft model's order
  const int32_t* counts;  // [num_rows]: see Proposals
  float* logits;          // [num_rows, vocab]: working memory
  int32_t num_rows;
  int32_t unused;
  double seconds;  // output: time of all passes of the draft model
};

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Chooses tokens with all threads of a team.
class Chooser {
 public:
  // A draw for the position after `drafted` tokens; `draw` is for the first position.
  struct Ask {
    const Draw* draw;
    const int32_t* drafted;
    int num_drafted;
  };

  Chooser(Team& team, int vocab)
      : team_(team), vocab_(vocab), samplers_(team.size(), Sampler(vocab)) {}

  // Chooses one token for each row of logits. Returns false if a draw names an id outside the
  // vocabulary.
  bool choose(const std::vector<Ask>& asks, const float* logits, int64_t* tokens) {
    asks_ = &asks;
    logits_ = logits;
    tokens_ = tokens;
    team_.next_task.store(0);
    team_.run([](void* self, int thread) { static_cast<Chooser*>(self)->work(thread); }, this);
    return std::none_of(tokens, tokens + asks.size(), [](int64_t token) { return token < 0; });
  }

 private:
  void work(int thread) {
    for (;;) {
      const size_t i = team_.next_task.fetch_add(1, std::memory_order_relaxed);
      if (i >= asks_->size()) return;
      const Ask& ask = (*asks_)[i];
      Draw draw = *ask.draw;
      draw.position += ask.num_drafted;
      Changes changes;
      if (draw.changes != nullptr) {
        changes = *draw.changes;
        changes.drafted = ask.drafted;
        changes.num_drafted = ask.num_drafted;
        draw.changes = &changes;
      }
      tokens_[i] = samplers_[thread].choose(logits_ + i * vocab_, draw);
    }
  }

  Team& team_;
  size_t vocab_;
  std::vector<Sampler> samplers_;  // one for each thread
  const std::vector<Ask>* asks_ = nullptr;
  const float* logits_ = nullptr;
  int64_t* tokens_ = nullptr;
};

// Proposes tokens. The first pass computes the rows as given. Each further pass computes the latest
// token of the rows that propose more tokens. Rows are sorted by the number of tokens they propose,
// highest first. So the rows of a pass are always the first rows of the pass before.
class Drafter {
 public:
  // `logits`: memory for the logits of the rows that propose.
  Drafter(Decoder& decoder, const Ragged& rows, float* logits, const Proposals& proposals)
      : decoder_(decoder), rows_(rows), logits_(logits), to_(proposals),
        chooser_(decoder.team(), decoder.vocab()), ones_(to_.num_rows, 1),
        ends_(rows.ends, rows.ends + to_.num_rows), latest_(to_.num_rows), keep_(to_.num_rows) {}

  // Returns false if a draw names an id that is not in the vocabulary.
  bool run() {
    int64_t end = -1;
    for (int r = 0; r < to_.num_rows; ++r) keep_[r] = end += rows_.lens[r];
    decoder_.forward(rows_, {keep_.data(), logits_, to_.num_rows, 0});
    for (int step = 0; num_proposing(step) > 0; ++step) {
      if (step > 0) extend(num_proposing(step));
      if (!choose(step, num_proposing(step))) return false;
    }
    return true;
  }

 private:
  int num_proposing(int step) const {
    return static_cast<int>(
        std::count_if(to_.counts, to_.counts + to_.num_rows, [&](int n) { return n > step; }));
  }

  int32_t* drafted(int row) { return to_.token_ids + static_cast<size_t>(row) * to_.counts[0]; }

  // Computes the latest tokens of the first `num_rows` rows.
  void extend(int num_rows) {
    for (int r = 0; r < num_rows; ++r) {
      ++ends_[r];
      keep_[r] = r;
    }
    const Ragged tokens{
        latest_.data(), ones_.data(), ends_.data(), rows_.tables, rows_.table_lens, num_rows, 0,
        nullptr};
    decoder_.forward(tokens, {keep_.data(), logits_, num_rows, 0});
  }

  bool choose(int step, int num_rows) {
    asks_.clear();
    for (int r = 0; r < num_rows; ++r) asks_.push_back({to_.draws + r, drafted(r), step});
    if (!chooser_.choose(asks_, logits_, latest_.data())) return false;
    for (int r = 0; r < num_rows; ++r) drafted(r)[step] = static_cast<int32_t>(latest_[r]);
    return true;
  }

  Decoder& decoder_;
  const Ragged& rows_;
  float* logits_;
  const Proposals& to_;
  Chooser chooser_;
  std::vector<int32_t> ones_, ends_;
  std::vector<int64_t> latest_;  // the last token that each row chose
  std::vector<int64_t> keep_;    // the token of each row whose logits are needed
  std::vector<Chooser::Ask> asks_;
};

// Verifies: computes rows followed by their proposed tokens, and chooses a token at each position.
class Verifier {
 public:
  Verifier(Decoder& decoder, const Ragged& rows, float* logits, Choices& choices)
      : decoder_(decoder), logits_(logits), of_(choices),
        lens_(rows.lens, rows.lens + rows.num_rows), ends_(rows.ends, rows.ends + rows.num_rows) {
    const Draw* draw = of_.draws;
    const int32_t* proposed = of_.proposed;
    const int64_t* own = rows.token_ids;
    for (int r = 0; r < rows.num_rows; own += rows.lens[r++]) {
      const int64_t begin = static_cast<int64_t>(token_ids_.size());
      const int count = of_.counts[r], num_proposed = std::max(count - 1, 0);
      token_ids_.insert(token_ids_.end(), own, own + rows.lens[r]);
      token_ids_.insert(token_ids_.end(), proposed, proposed + num_proposed);
      for (int i = 0; i < count; ++i) {
        asks_.push_back({draw, proposed, i});
        keep_.push_back(begin + rows.lens[r] - 1 + i);
      }
      for (int i = 0; i < of_.scored[r]; ++i) scored_.push_back(begin + i);
      draw += count > 0;
      proposed += num_proposed;
      lens_[r] += num_proposed;
      ends_[r] += num_proposed;
    }
    keep_.insert(keep_.end(), scored_.begin(), scored_.end());
    rows_ = {token_ids_.data(),
             lens_.data(),
             ends_.data(),
             rows.tables,
             rows.table_lens,
             rows.num_rows,
             0};
  }

  // Returns false if a draw names an id that is not in the vocabulary.
  bool run() {
    const auto begin = std::chrono::steady_clock::now();
    decoder_.forward(rows_, {keep_.data(), logits_, static_cast<int32_t>(keep_.size()), 0});
    of_.forward_s = seconds_since(begin);
    Chooser chooser(decoder_.team(), decoder_.vocab());
    return asks_.empty() || chooser.choose(asks_, logits_, of_.token_ids);
  }

 private:
  Decoder& decoder_;
  float* logits_;
  Choices& of_;
  std::vector<int32_t> lens_, ends_;
  std::vector<int64_t> token_ids_, keep_, scored_;
  std::vector<Chooser::Ask> asks_;
  Ragged rows_;
};

// Lets a draft model propose tokens for rows of a verification, and writes them to
// `choices.proposed`. `seen` are the rows in the form that the draft model computes. Returns false
// if a draw names an id that is not in the vocabulary.
inline bool propose(Decoder& draft, const Ragged& seen, Drafting& drafting, const Choices& choices,
                    int num_rows) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int> draw_of(num_rows), place_of(num_rows);
  for (int r = 0, draw = 0, place = 0; r < num_rows; ++r) {
    draw_of[r] = draw;
    place_of[r] = place;
    draw += choices.counts[r] > 0;
    place += std::max(choices.counts[r] - 1, 0);
  }
  const int num = drafting.num_rows, longest = drafting.counts[0];
  std::vector<Draw> draws(num);
  std::vector<int32_t> token_ids(static_cast<size_t>(num) * longest);
  for (int i = 0; i < num; ++i) draws[i] = choices.draws[draw_of[drafting.rows[i]]];
  const Proposals proposals{drafting.counts, draws.data(), token_ids.data(), num, 0};
  if (!Drafter(draft, seen, drafting.logits, proposals).run()) return false;
  for (int i = 0; i < num; ++i)
    std::copy_n(token_ids.data() + static_cast<size_t>(i) * longest, drafting.counts[i],
                choices.proposed + place_of[drafting.rows[i]]);
  drafting.seconds = seconds_since(begin);
  return true;
}

}  // namespace baton
