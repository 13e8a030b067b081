// Matches of n-grams: decode/ngram.py defines them, and is their slow twin.
//
// There is no index. A search reads four bytes of each token, while the step that follows reads the
// K and V of each: hundreds of times as many.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int kLongest = 4, kShortest = 2;
constexpr int kLonger[] = {16, 8};  // lengths reported for matches beyond the longest size
constexpr int kAtOnce = 16;         // places that are searched together, in a few instructions

class Sequence {
 public:
  void append(const int32_t* tokens, int count) {
    tokens_.insert(tokens_.end(), tokens, tokens + count);
  }

  // Sets where the match begins, and returns its length; 0 if there is none.
  int find(int32_t* start) const {
    const int num = static_cast<int>(tokens_.size());
    if (num <= kShortest) return 0;
    const int32_t* tokens = tokens_.data();
    const int32_t last = tokens[num - 1], before = tokens[num - 2];
    int found = 0;
    int end = num - 1;  // a run that occurred before ends here, or earlier
    const auto look_at = [&](int place) {
      if (tokens[place - 1] != last || tokens[place - 2] != before) return;
      const int size = common(place, num, kLongest);
      if (size > found) found = size, *start = place;
    };
    for (; end - kAtOnce >= kShortest && found < kLongest; end -= kAtOnce) {
      int any = 0;
      for (int i = 0; i < kAtOnce; ++i)
        any |= (tokens[end - 1 - i] == last) & (tokens[end - 2 - i] == before);
      if (any)
        for (int i = 0; i < kAtOnce && found < kLongest; ++i) look_at(end - i);
    }
    for (; end >= kShortest && found < kLongest; --end) look_at(end);
    if (found == kLongest)
      for (const int longer : kLonger)
        if (common(*start, num, longer) == longer) return longer;
    return found;
  }

 private:
  // Counts the equal tokens before both places, up to `most`.
  int common(int place, int other, int most) const {
    int size = 0;
    while (size < most && size < place && tokens_[place - 1 - size] == tokens_[other - 1 - size])
      ++size;
    return size;
  }

  std::vector<int32_t> tokens_;
};

}  // namespace

extern "C" {

void* baton_ngrams_open() { return new Sequence; }
void baton_ngrams_close(void* sequence) { delete static_cast<Sequence*>(sequence); }

// For each of `num` sequences: appends its new tokens, which follow one another in `tokens`, and
// finds its match.
void baton_ngrams_look(void* const* sequences, int32_t num, const int32_t* counts,
                       const int32_t* tokens, int32_t* starts, int32_t* lengths) {
  for (int i = 0; i < num; tokens += counts[i++]) {
    Sequence& sequence = *static_cast<Sequence*>(sequences[i]);
    sequence.append(tokens, counts[i]);
    lengths[i] = sequence.find(starts + i);
  }
}

}  // extern "C"
