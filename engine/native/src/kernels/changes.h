// Changes a row's logits before a choice, in the order of engine/model/sampling/changes.py.
//
// This takes two passes over the logits, which are copied, and one pass over the context. The
// memory for token counts is reused from row to row. Between rows all counts are zero, because used
// counts are reset.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace baton {

struct Changes {
  const int32_t *history, *drafted;  // the context; null without penalties
  const int32_t *banned, *biased;
  const float* biases;   // one for each id in `biased`; these ids are distinct
  const uint32_t* mask;  // bit i % 32 of word i / 32: id i is allowed; null: all ids are allowed
  int32_t num_history, num_drafted, num_banned, num_biased, num_words;
  int32_t prompt_len;  // start of the answer in history and drafted tokens together
  float repetition, frequency, presence;
  int32_t unused;
};

// Changes logits for one thread. Its memory is reused from row to row.
class Changer {
 public:
  // Returns the changed logits, valid until the next call; null if an id is outside the vocabulary.
  const float* apply(const float* logits, int vocab, const Changes& changes) {
    if (!knows_all_ids(vocab, changes)) return nullptr;
    x_.resize(vocab);
    std::transform(logits, logits + vocab, x_.begin(), finite);
    if (changes.num_history > 0 || changes.num_drafted > 0) penalise(changes);
    for (int i = 0; i < changes.num_biased; ++i) {
      float& x = x_[changes.biased[i]];
      x = finite(x + changes.biases[i]);
    }
    if (changes.mask != nullptr) mask(changes.mask, changes.num_words);
    for (int i = 0; i < changes.num_banned; ++i) x_[changes.banned[i]] = kNever;
    return x_.data();
  }

 private:
  static constexpr float kGreatest = std::numeric_limits<float>::max();
  static constexpr float kNever = -std::numeric_limits<float>::infinity();
  static constexpr int kGroup = 32;  // ids in one word of a mask

  static float finite(float x) { return std::min(std::max(x, -kGreatest), kGreatest); }

  static bool knows_all_ids(int vocab, const Changes& c) {
    return are_below(vocab, c.history, c.num_history) &&
           are_below(vocab, c.drafted, c.num_drafted) && are_below(vocab, c.banned, c.num_banned) &&
           are_below(vocab, c.biased, c.num_biased);
  }

  // As unsigned numbers, negative ids are large.
  static bool are_below(int vocab, const int32_t* ids, int num_ids) {
    uint32_t highest = 0;
    for (int i = 0; i < num_ids; ++i) highest = std::max(highest, static_cast<uint32_t>(ids[i]));
    return num_ids == 0 || highest < static_cast<uint32_t>(vocab);
  }

  void penalise(const Changes& c) {
    counts_.resize((x_.size() + kGroup - 1) / kGroup * kGroup);
    const int num_prompt = std::clamp(c.prompt_len, 0, c.num_history);
    const int num_drafted_prompt = std::clamp(c.prompt_len - c.num_history, 0, c.num_drafted);
    note_prompt(c.history, c.history + num_prompt);
    note_answer(c.history + num_prompt, c.history + c.num_history);
    note_prompt(c.drafted, c.drafted + num_drafted_prompt);
    note_answer(c.drafted + num_drafted_prompt, c.drafted + c.num_drafted);
    const int vocab = static_cast<int>(x_.size());
    for (int start = 0; start < vocab; start += kGroup) {
      uint32_t* counts = counts_.data() + start;
      if (are_zero(counts)) continue;
      float* x = x_.data() + start;
      if (start + kGroup <= vocab) penalise_group(x, counts, c);
      else
        for (int i = 0; i < vocab - start; ++i) x[i] = penalised(x[i], counts[i], c);
      std::fill(counts, counts + kGroup, 0);
    }
  }

  // A count is twice the number of occurrences in the answer, plus one if the prompt has the token.
  void note_prompt(const int32_t* id, const int32_t* end) {
    for (; id < end; ++id) counts_[*id] |= 1;
  }
  void note_answer(const int32_t* id, const int32_t* end) {
    for (; id < end; ++id) counts_[*id] += 2;
  }

  static bool are_zero(const uint32_t* counts) {
    uint32_t any = 0;
    for (int i = 0; i < kGroup; ++i) any |= counts[i];
    return any == 0;
  }

  static void penalise_group(float* x, const uint32_t* counts, const Changes& c) {
    const Changes penalties = c;  // a copy, so that the compiler knows that `x` is not a part of it
    for (int i = 0; i < kGroup; ++i) x[i] = penalised(x[i], counts[i], penalties);
  }

  // Computes all possible results and selects one, so that the compiler can vectorise a group.
  static float penalised(float x, uint32_t count, const Changes& c) {
    const float times = static_cast<float>(static_cast<int32_t>(count / 2));
    const float repeated = finite(x > 0 ? x / c.repetition : x * c.repetition);
    const float rarer = finite(finite(repeated - c.frequency * times) - c.presence);
    return count == 0 ? x : times > 0 ? rarer : repeated;
  }

  void mask(const uint32_t* words, int num_words) {
    const int vocab = static_cast<int>(x_.size());
    for (int start = 0; start < vocab; start += kGroup) {
      const uint32_t word = start / kGroup < num_words ? words[start / kGroup] : 0;
      float* x = x_.data() + start;
      if (start + kGroup <= vocab) mask_word(x, word);
      else
        for (int i = 0; i < vocab - start; ++i) x[i] = word >> i & 1 ? x[i] : kNever;
    }
  }

  static void mask_word(float* x, uint32_t word) {  // enough ids for vectorisation
    for (int i = 0; i < kGroup; ++i) x[i] = word >> i & 1 ? x[i] : kNever;
  }

  std::vector<float> x_;
  std::vector<uint32_t> counts_;
};

}  // namespace baton
