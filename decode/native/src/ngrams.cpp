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

// Odd, and another in each process: nobody can choose tokens so that their runs meet in one slot.
uint64_t some_factor() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 32 | random()) | 1;
}
const uint64_t kFactor = some_factor();

// The place behind the most recent occurrence of each run of `size` tokens. A run is found in the
// sequence itself, so a place is all that is kept of it: an index stays in the caches.
class Places {
 public:
  explicit Places(int size) : size_(size) {}

  // Makes room for so many runs.
  void reserve(size_t num, const int32_t* tokens) {
    if (2 * num <= slots_.size()) return;
    std::vector<int32_t> old(std::bit_ceil(std::max<size_t>(16, 2 * num)));
    old.swap(slots_);
    for (const int32_t place : old)
      if (place > 0) slot_of(tokens, place) = place;
  }
  void put(const int32_t* tokens, int32_t place) {
    if (place >= size_) slot_of(tokens, place) = place;
  }
  // The place of the run that ends at `end`; 0 if it has not occurred.
  int32_t get(const int32_t* tokens, int32_t end) {
    return end < size_ || slots_.empty() ? 0 : slot_of(tokens, end);
  }

 private:
  int32_t& slot_of(const int32_t* tokens, int32_t end) {
    const int32_t* run = tokens + end - size_;
    uint64_t hash = 0;
    for (int i = 0; i < size_; ++i) hash = (hash + static_cast<uint32_t>(run[i]) + 1) * kFactor;
    const size_t mask = slots_.size() - 1;
    size_t i = hash >> (64 - std::countr_zero(slots_.size()));  // the best mixed bits
    while (slots_[i] != 0 && !std::equal(run, run + size_, tokens + slots_[i] - size_))
      i = (i + 1) & mask;
    return slots_[i];
  }

  int size_;
  std::vector<int32_t> slots_;  // a power of two; 0 is free
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
    for (Places& places : places_) {
      places.reserve(all, tokens_.data());
      for (int place = begin + 1; place <= end; ++place) places.put(tokens_.data(), place);
    }
    num_indexed_ = end;
    return end - begin;
  }

  // Sets where the match begins, and returns its length; 0 if there is none.
  int find(int32_t* start) {
    for (int i = 0; i < kSizes; ++i) {
      *start = places_[i].get(tokens_.data(), static_cast<int32_t>(tokens_.size()));
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
  int num_indexed_ = 0;
  Places places_[kSizes] = {Places(4), Places(3), Places(2)};
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
