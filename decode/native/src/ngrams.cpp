// Indexes of n-grams: decode/ngram.py defines them, and is their slow twin.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

namespace {

constexpr int kLongest = 4, kShortest = 2;
constexpr int kSizes = kLongest - kShortest + 1;
constexpr int kLonger[] = {16, 8};  // lengths reported for matches beyond the longest size
constexpr uint64_t kLow = 0xFFFFFFFF;

// A run of at most four tokens. Each id is plus one, so that zero means no token.
struct Run {
  uint64_t older = 0, newer = 0;

  void append(int32_t token) {
    older = older << 32 | newer >> 32;
    newer = newer << 32 | (static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1);
  }
  // Its last tokens.
  Run last(int size) const {
    if (size == 4) return *this;
    return {size == 3 ? older & kLow : 0, newer};
  }
  bool operator==(const Run&) const = default;
};

// Odd, and another in each process: nobody can choose tokens so that their runs meet in one slot.
uint64_t some_factor() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 32 | random()) | 1;
}
const uint64_t kNewerFactor = some_factor(), kOlderFactor = some_factor();

// The place behind the most recent occurrence of each run of one size.
class Places {
 public:
  void put(const Run& run, int32_t place) {
    if (2 * (num_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[find(run)];
    num_ += slot.place == 0;
    slot = {run, place};
  }
  // 0 if the run has not occurred.
  int32_t get(const Run& run) const { return slots_.empty() ? 0 : slots_[find(run)].place; }

 private:
  struct Slot {
    Run run;
    int32_t place = 0;  // never 0 if it is taken
  };

  size_t find(const Run& run) const {
    const uint64_t hash = run.newer * kNewerFactor + run.older * kOlderFactor;
    size_t i = hash >> (64 - std::countr_zero(slots_.size()));  // the best mixed bits
    while (slots_[i].place != 0 && slots_[i].run != run) i = (i + 1) & (slots_.size() - 1);
    return i;
  }

  void grow() {
    std::vector<Slot> old(std::max<size_t>(16, 2 * slots_.size()));
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.place != 0) slots_[find(slot.run)] = slot;
  }

  std::vector<Slot> slots_;  // a power of two
  size_t num_ = 0;
};

class Index {
 public:
  void append(const int32_t* tokens, int count) {
    tokens_.insert(tokens_.end(), tokens, tokens + count);
  }

  // Indexes up to so many more tokens, but not the last one. Returns how many those were.
  int index(int most) {
    const int begin = num_indexed_, all = static_cast<int>(tokens_.size());
    const int end = std::max(begin, std::min(begin + most, all - 1));
    while (num_indexed_ < end) {
      run_.append(tokens_[num_indexed_++]);
      for (int i = 0; i < kSizes; ++i) places_[i].put(run_.last(kLongest - i), num_indexed_);
    }
    return end - begin;
  }

  // Sets where the match begins, and returns its length; 0 if there is none.
  int find(int32_t* start) const {
    const int all = static_cast<int>(tokens_.size());
    Run run;
    for (int i = std::max(0, all - kLongest); i < all; ++i) run.append(tokens_[i]);
    for (int i = 0; i < kSizes; ++i) {
      *start = places_[i].get(run.last(kLongest - i));
      if (*start > 0) return i > 0 ? kLongest - i : length(*start);
    }
    return 0;
  }

 private:
  int length(int start) const {
    for (const int longer : kLonger)
      if (start >= longer &&
          std::equal(tokens_.end() - longer, tokens_.end(), tokens_.begin() + start - longer))
        return longer;
    return kLongest;
  }

  std::vector<int32_t> tokens_;
  Run run_;  // that ends with the last indexed token
  int num_indexed_ = 0;
  Places places_[kSizes];
};

}  // namespace

extern "C" {

void* baton_ngrams_open() { return new Index; }
void baton_ngrams_close(void* index) { delete static_cast<Index*>(index); }

// For each of `num` indexes: appends its new tokens, which follow one another in `tokens`, indexes
// some, and finds its match. `budget` tokens are indexed in all, but `own` of each in any case.
void baton_ngrams_look(void* const* indexes, int32_t num, const int32_t* counts,
                       const int32_t* tokens, int32_t budget, int32_t own, int32_t* starts,
                       int32_t* lengths) {
  for (int i = 0; i < num; tokens += counts[i++]) {
    Index& index = *static_cast<Index*>(indexes[i]);
    index.append(tokens, counts[i]);
    budget -= index.index(std::max(budget, own));
    lengths[i] = index.find(starts + i);
  }
}

}  // extern "C"
