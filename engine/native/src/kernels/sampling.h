// Chooses exactly the tokens that engine/model/sampling/choosing.py defines. One thread does a row.
//
//     token = argmax(mask(score) + g),   score = (logit - best) / temperature,   g = -log(-log(u))
//
// 1. Masks. Each is a lower bound for the score, so one lowest logit of a row survives.
// 2. A race in fp32. With e = -log(u), the argmax of score + g is the argmin of e * exp(-score),
//    whose logarithm is -(score + g). That is one logarithm and one exponential for each token,
//    sixteen at once.
// 3. Tokens that the race cannot tell from its winner are compared in fp64, as the definition says.
//
// What the race leaves out. u = (w + 1/2) / 2^32 lies in [2^-33, 1 - 2^-33], so e lies in
// [2^-33, 22.88]. The best token, score 0, finishes by 22.88. A token whose score is below -27
// finishes after 2^-33 e^27 > 60 and cannot win. So -27 is a lower bound like those of the masks.
//
// What the race may get wrong. For scores from -27 to 0:
//     the score in fp32   best - logit, 1 / temperature and their product are rounded once each:
//                         3 * 2^-24 of 27                                                   4.9e-6
//     its exponential     about 2 units in the last place                                   0.3e-6
//     e                   u in fp32, two roundings: 2^-23 in log(u), which is at least 0.28 below
//                         u = 3/4, where 1 - u takes its place; the logarithm, 3 units      0.8e-6
//     the product                                                                           0.1e-6
// Together less than 1e-5 of the product, so the definition's winner finishes within 2.1e-5 of the
// race's. kMargin is five times that.
//
// Masses (`top_p`) are sums in fp64 of exponentials that are exact to a unit or two in the last
// place, as in the definition. Only a mask that equals a cumulated mass to 13 digits is in doubt.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <vector>

#include "changes.h"
#include "simd.h"

namespace baton {

struct Draw {  // a row's `Choice`
  double temperature, top_p, min_p;
  uint64_t seed;
  int64_t position;
  int32_t top_k, unused;   // top_k: 0 or less than the vocabulary
  const Changes* changes;  // null: logits are not changed
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kHopeless = -27.0;  // a token with a lower score cannot win
constexpr float kLatest = 23.0f;     // by then the best token has finished
constexpr float kMargin = 1e-4f;
constexpr double kLeastTemperature =
    0x1p-60;  // outside these bounds fp32 may not hold 1 / temperature
constexpr double kGreatestTemperature = 0x1p60;

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxWeyl[2] = {0x9E3779B9, 0xBB67AE85};

// Word `token_id % 4` of Philox4x32-10, counter (token_id / 4, position, 0, 0), key seed.
inline uint32_t philox_word(uint32_t token_id, const Draw& draw) {
  uint32_t c[4] = {token_id / 4, static_cast<uint32_t>(draw.position), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultipliers[0]) * c[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultipliers[1]) * c[2];
    c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k0;
    c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k1;
    c[1] = static_cast<uint32_t>(product1);
    c[3] = static_cast<uint32_t>(product0);
    k0 += kPhiloxWeyl[0];
    k1 += kPhiloxWeyl[1];
  }
  return c[token_id % 4];
}

// Computes four words for each of sixteen counters.
inline void philox(Words counter, const Draw& draw, Words (&words)[4]) {
  const Words m0 = fill_words(kPhiloxMultipliers[0]), m1 = fill_words(kPhiloxMultipliers[1]);
  Words c0 = counter, c1 = fill_words(static_cast<uint32_t>(draw.position));
  Words c2 = fill_words(0), c3 = c2;
  uint32_t k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const WidePair product0 = multiply_wide(c0, m0), product1 = multiply_wide(c2, m1);
    c0 = bits_xor(bits_xor(product1.high, c1), fill_words(k0));
    c2 = bits_xor(bits_xor(product0.high, c3), fill_words(k1));
    c1 = product1.low;
    c3 = product0.low;
    k0 += kPhiloxWeyl[0];
    k1 += kPhiloxWeyl[1];
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// e = -log(u) of words w. Near u = 1 it is computed from v = 1 - u, for precision relative to e.
inline Vec exponential(Words w) {
  const Vec unit = fill(0x1p-32f), half = fill(0.5f);
  const Vec u = mul(add(from_unsigned(w), half), unit);
  const Vec v = mul(add(from_unsigned(bits_xor(w, fill_words(0xFFFFFFFF))), half), unit);
  const Scaled parts = split(u);  // the exponent is 0 for v < 1/4
  const Vec f = where_less(v, fill(0.25f), sub(zeros(), v), sub(parts.mantissa, fill(1.0f)));
  return sub(zeros(), log_of_parts(f, parts.exponent));
}

// Integers in the order of floats: order_of(x) < order_of(y) exactly if x < y.
inline int64_t order_of(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  return bits >= 0 ? bits : -static_cast<int64_t>(bits & 0x7FFFFFFF);
}
inline float float_at(int64_t order) {
  const auto bits = static_cast<uint32_t>(order >= 0 ? order : -order);
  return std::bit_cast<float>(order >= 0 ? bits : bits | 0x80000000u);
}

// Chooses tokens for one thread. Its memory is reused from row to row.
class Sampler {
 public:
  explicit Sampler(int vocab) : vocab_(vocab) {}

  // Returns the token of a row of logits; any token if a logit is NaN; -1 if a changed id is
  // outside the vocabulary.
  int64_t choose(const float* logits, const Draw& draw) {
    logits_ = draw.changes == nullptr ? logits : changed(logits, *draw.changes);
    if (logits_ == nullptr) return -1;
    const int first_best = find_best();
    if (!(draw.temperature > 0) || !std::isfinite(best_)) return first_best;
    temperature_ = draw.temperature;
    const double bound = lower_bound(draw);
    if (bound > 0) return 0;  // min_p above 1 masks every token; then the first one is chosen
    least_ = least_logit(bound);
    draw_ = &draw;
    winner_ = first_best;
    highest_ = -std::numeric_limits<double>::infinity();
    if (kLeastTemperature <= temperature_ && temperature_ <= kGreatestTemperature) race();
    else
      for (int id = 0; id < vocab_; ++id) compare(id);
    return winner_;
  }

 private:
  static constexpr int kGroup = 4 * kLanes;  // tokens whose noise is computed together
  static constexpr int kBisections = 10;     // leave one in a thousand if logits are spread evenly

  const float* changed(const float* logits, const Changes& changes) const {
    thread_local Changer changer;  // memory is kept from call to call
    return changer.apply(logits, vocab_, changes);
  }

  double score(float logit) const {
    return (static_cast<double>(logit) - static_cast<double>(best_)) / temperature_;
  }

  // The logits from `start` on; minus infinity after the end of the vocabulary.
  const float* group(int start, float (&padded)[kGroup]) const {
    if (start + kGroup <= vocab_) return logits_ + start;
    std::fill(std::copy(logits_ + start, logits_ + vocab_, padded), padded + kGroup, -kInfinity);
    return padded;
  }

  static float group_max(const float* x) {
    Vec highest = fill(-kInfinity);
    for (int i = 0; i < kGroup; i += kLanes) highest = max(load(x + i), highest);  // skips NaN
    return max_lanes(highest);
  }

  // Sets best_, and returns the first id with this logit.
  int find_best() {
    float padded[kGroup];
    int where = 0;
    best_ = -kInfinity;
    for (int start = 0; start < vocab_; start += kGroup) {
      const float highest = group_max(group(start, padded));
      if (highest > best_) {
        best_ = highest;
        where = start;
      }
    }
    while (where < vocab_ - 1 && logits_[where] != best_) ++where;
    return best_ == -kInfinity ? 0 : where;
  }

  // The lowest score that all masks allow, or kHopeless if that is higher.
  double lower_bound(const Draw& draw) {
    double bound = kHopeless;
    if (draw.min_p > 0) bound = std::max(bound, std::log(draw.min_p));
    if (draw.top_k > 0) bound = std::max(bound, bound_of_top_k(draw.top_k, draw.top_p));
    else if (draw.top_p < 1) bound = std::max(bound, bound_of_top_p(draw.top_p));
    return bound;
  }

  // The lowest logit whose score is at least `bound`, which is at most 0. Scores never fall as
  // logits grow, but different logits may have the same score.
  float least_logit(double bound) const {
    int64_t below = order_of(-kInfinity), enough = order_of(best_);
    while (enough - below > 1) {
      const int64_t middle = below + (enough - below) / 2;
      (score(float_at(middle)) >= bound ? enough : below) = middle;
    }
    return float_at(enough);
  }

  // Sorts `begin` … `end`. Returns the score at which their masses raise `above` to `enough`.
  double reach(float* begin, float* end, double above, double enough) const {
    std::sort(begin, end, std::greater<>());
    for (const float* x = begin; x < end; ++x) {
      above += std::exp(score(*x));
      if (above >= enough) return score(*x);
    }
    return score(end[-1]);
  }

  double bound_of_top_k(int k, double top_p) {
    keep_highest(k);
    std::sort(kept_.begin(), kept_.end(), std::greater<>());
    double total = 0;
    for (float x : kept_) total += std::exp(score(x));
    return reach(kept_.data(), kept_.data() + k, 0, total * top_p);
  }

  // Reduces kept_ to the k highest logits, in any order.
  void keep_highest(int k) {
    float padded[kGroup];
    float beaten = -kInfinity;  // at least k of the kept logits are not below this number
    size_t count = 0;
    kept_.resize(2 * static_cast<size_t>(k) + kGroup);
    for (int start = 0; start < vocab_; start += kGroup) {
      const float* x = group(start, padded);
      if (group_max(x) <= beaten) continue;
      for (int i = 0; i < kGroup; ++i) {
        kept_[count] = x[i];
        count += x[i] > beaten;
      }
      if (count > 2 * static_cast<size_t>(k)) {
        std::nth_element(kept_.begin(), kept_.begin() + (k - 1), kept_.begin() + count,
                         std::greater<>());
        beaten = kept_[k - 1];
        count = k;
      }
    }
    // Logits of minus infinity are not kept, so fewer than k may be kept.
    std::fill(kept_.begin() + count, kept_.end(), -kInfinity);
    std::nth_element(kept_.begin(), kept_.begin() + (k - 1), kept_.end(), std::greater<>());
    kept_.resize(k);
  }

  // Bisects between a logit from which the mass is enough and a logit from which it is not. Sorts
  // the few logits that are left between the two.
  double bound_of_top_p(double top_p) {
    const double enough = weigh() * top_p;
    if (!(enough > 0)) return 0;
    const float least = least_logit(kHopeless);
    float low = lowest_from(least), high = std::nextafter(best_, kInfinity);
    if (mass_from(low) < enough) return kHopeless;
    double above = 0;
    for (int i = 0; i < kBisections; ++i) {
      const float middle = low + (high - low) / 2;
      const double mass = mass_from(middle);
      if (mass >= enough) {
        low = middle;
      } else {
        high = middle;
        above = mass;
      }
    }
    keep_between(low, high);
    return reach(kept_.data(), kept_.data() + kept_.size(), above, enough);
  }

  // Computes masses_ for the logits and for the padding of the last group. Returns their sum.
  double weigh() {
    float padded[kGroup];
    masses_.resize((vocab_ + kGroup - 1) / kGroup * kGroup);
    const Doubles best = fill_fp64(best_), temperature = fill_fp64(temperature_);
    Doubles sums[kGroup / 8];
    std::fill(sums, std::end(sums), fill_fp64(0));
    for (int start = 0; start < vocab_; start += kGroup) {
      const float* logits = group(start, padded);
      for (int i = 0; i < kGroup / 8; ++i) {
        const Doubles logit = widen(_mm256_loadu_ps(logits + 8 * i));
        const Doubles mass = exp(div(sub(logit, best), temperature));
        store_fp64(masses_.data() + start + 8 * i, mass);
        sums[i] = add(sums[i], mass);
      }
    }
    return sum_of(sums);
  }

  // The mass of all logits that are at least `least`.
  double mass_from(float least) const {
    float padded[kGroup];
    const Doubles bound = fill_fp64(least), none = fill_fp64(0);
    Doubles sums[kGroup / 8];
    std::fill(sums, std::end(sums), none);
    for (int start = 0; start < vocab_; start += kGroup) {
      const float* logits = group(start, padded);
      for (int i = 0; i < kGroup / 8; ++i) {
        const Doubles logit = widen(_mm256_loadu_ps(logits + 8 * i));
        const Doubles mass = load_fp64(masses_.data() + start + 8 * i);
        sums[i] = add(sums[i], where_less(logit, bound, none, mass));
      }
    }
    return sum_of(sums);
  }

  static double sum_of(const Doubles (&sums)[kGroup / 8]) {
    Doubles total = sums[0];
    for (int i = 1; i < kGroup / 8; ++i) total = add(total, sums[i]);
    return sum_lanes(total);
  }

  // The lowest logit that is at least `least`.
  float lowest_from(float least) const {
    float padded[kGroup];
    const Vec bound = fill(least), none = fill(kInfinity);
    Vec lowest = none;
    for (int start = 0; start < vocab_; start += kGroup) {
      const float* logits = group(start, padded);
      for (int i = 0; i < kGroup; i += kLanes) {
        const Vec x = load(logits + i);
        lowest = min(lowest, where_less(x, bound, none, x));
      }
    }
    return min_lanes(lowest);
  }

  // Reduces kept_ to the logits from `low` to below `high`, in any order.
  void keep_between(float low, float high) {
    float padded[kGroup];
    const Vec bound = fill(high), none = fill(-kInfinity);
    size_t count = 0;
    kept_.resize(vocab_ + kLanes);
    for (int start = 0; start < vocab_; start += kGroup) {
      const float* logits = group(start, padded);
      for (int i = 0; i < kGroup; i += kLanes) {
        const Vec x = load(logits + i);
        const Vec below = where_less(x, bound, x, none);
        if (max_lanes(below) < low) continue;  // the usual case: few are left to keep
        float lanes[kLanes];
        store(lanes, below);
        for (float lane : lanes) {
          kept_[count] = lane;
          count += lane >= low;
        }
      }
    }
    kept_.resize(count);
  }

  // Lane 4 i + r of the vector that transpose_fours leaves at w is token 16 r + 4 i + w of a group.
  static constexpr uint32_t kCounters[kLanes] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                 2, 6, 10, 14, 3, 7, 11, 15};

  void race() {
    const Vec best = fill(best_), least = fill(least_);
    const Vec per_score = fill(static_cast<float>(1.0 / temperature_));
    float limit = kLatest;
    float padded[kGroup], finish[kGroup];
    for (int start = 0; start < vocab_; start += kGroup) {
      const float* logits = group(start, padded);
      if (group_max(logits) < least_) continue;
      Vec x[4] = {load(logits), load(logits + kLanes), load(logits + 2 * kLanes),
                  load(logits + 3 * kLanes)};
      transpose_fours(x);
      Words words[4];
      philox(add(load_words(kCounters), fill_words(start / 4)), *draw_, words);
      Vec earliest = fill(kInfinity);
      for (int w = 0; w < 4; ++w) {
        const Vec time = mul(exponential(words[w]), exp(mul(sub(best, x[w]), per_score)));
        const Vec counted = where_less(x[w], least, fill(kInfinity), time);
        store(finish + w * kLanes, counted);
        earliest = min(earliest, counted);
      }
      const float first = min_lanes(earliest);
      if (first > limit) continue;
      limit = std::min(limit, first * (1 + kMargin));
      for (int i = 0; i < kGroup; ++i)
        if (finish[i] <= limit)
          compare(start + static_cast<int>(4 * kCounters[i % kLanes]) + i / kLanes);
    }
  }

  // Makes `id` the winner if the definition prefers it to the present winner.
  void compare(int id) {
    if (logits_[id] < least_) return;
    const double u = (philox_word(id, *draw_) + 0.5) * 0x1p-32;
    const double noisy = score(logits_[id]) - std::log(-std::log(u));
    if (noisy > highest_ || (noisy == highest_ && id < winner_)) {
      highest_ = noisy;
      winner_ = id;
    }
  }

  int vocab_;
  std::vector<float> kept_;
  std::vector<double> masses_;

  // State for the present row:
  const float* logits_ = nullptr;
  const Draw* draw_ = nullptr;
  float best_ = 0, least_ = 0;
  double temperature_ = 0, highest_ = 0;
  int winner_ = 0;
};

}  // namespace baton
