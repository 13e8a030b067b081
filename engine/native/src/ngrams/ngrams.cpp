// Finds matches of n-grams. decode/ngram.py defines them, and does the same slowly.
//
// There is no index. A search reads four bytes of each token. The step that follows reads the K and
// V of each token: hundreds of times as many bytes.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int kLongest = 4, kShortest = 2;
constexpr int kLonger[] = {16, 8};  // lengths reported for longer matches
constexpr int kAtOnce = 16;         // places that a few instructions compare together

class Sequence {
 public:
  void append(const int32_t* tokens, int count) {
    tokens_.insert(tokens_.end(), tokens, tokens + count);
  }

  // Sets `start` to the beginning of the match, and returns its length; 0 if there is no match.
  int find(int32_t* start) const {
    const int num = static_cast<int>(tokens_.size());
    if (num <= kShortest) return 0;
    const int32_t* tokens = tokens_.data();
    const int32_t last = tokens[num - 1], before = tokens[num - 2];
    int found = 0;
    int end = num - 1;  // an earlier match ends here or before
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

// For each of `num` sequences: appends its new tokens from `tokens`, where the sequences' tokens
// follow one another, and finds the sequence's match.
void baton_ngrams_look(void* const* sequences, int32_t num, const int32_t* counts,
                       const int32_t* tokens, int32_t* starts, int32_t* lengths) {
  for (int i = 0; i < num; tokens += counts[i++]) {
    Sequence& sequence = *static_cast<Sequence*>(sequences[i]);
    sequence.append(tokens, counts[i]);
    lengths[i] = sequence.find(starts + i);
  }
}

}  // extern "C"
