// Converts the tokens of one step to the bytes that streams send: detokenising, escaping for JSON,
// HTTP's chunked coding and sending, in one pass over all streams. Called through ctypes: see
// library.py. Callers hold Python's global lock, so two threads never call at the same time.
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "frame.h"

namespace {

constexpr std::string_view REPLACEMENT = "\xef\xbf\xbd";

// The bytes of each token, by id.
class Vocabulary {
 public:
  // Token i has the bytes from ends[i - 1] up to ends[i].
  Vocabulary(const char* bytes, const int64_t* ends, const char* is_special, int64_t size)
      : ends_(ends, ends + size), is_special_(is_special, is_special + size),
        bytes_(bytes, size ? static_cast<size_t>(ends[size - 1]) : 0) {}

  // A token beyond the vocabulary has no bytes.
  std::string_view bytes_of(int64_t id, bool shows_special) const {
    if (id < 0 || id >= static_cast<int64_t>(ends_.size())) return {};
    const auto at = static_cast<size_t>(id);
    if (is_special_[at] && !shows_special) return {};
    const auto begin = static_cast<size_t>(at ? ends_[at - 1] : 0);
    return std::string_view(bytes_).substr(begin, static_cast<size_t>(ends_[at]) - begin);
  }

 private:
  std::vector<int64_t> ends_;
  std::vector<char> is_special_;
  std::string bytes_;
};

// One series of a histogram. A value is counted in the first bucket with a bound of at least the
// value.
struct Series {
  const double* bounds;
  int64_t num_bounds;
  int64_t* counts;
  double* sum;

  void observe(double value) {
    counts[std::lower_bound(bounds, bounds + num_bounds, value) - bounds] += 1;
    *sum += value;
  }
};

// The same structure as `NativeText` in router/text/native.py.
struct Text {
  const Vocabulary* vocabulary;
  const char* before;  // the part of a chunk before its text
  int64_t before_len;
  const char* after;
  int64_t after_len;
  const int64_t* end_ids;  // tokens not shown after `min_tokens` tokens
  int64_t num_end_ids;
  int64_t min_tokens;
  Series* gaps;  // seconds between tokens
  int64_t num_tokens;
  int64_t num_batched;
  double last_s;
  int32_t shows_special;
  int32_t rest_len;
  uint8_t rest[4];  // the first bytes of an incomplete character

  bool hides(int64_t id) const {
    return num_tokens > min_tokens &&
           std::find(end_ids, end_ids + num_end_ids, id) != end_ids + num_end_ids;
  }
};

void escape(uint8_t byte, std::string& out) {
  static constexpr char HEX[] = "0123456789abcdef";
  switch (byte) {
    case '"': out += "\\\""; return;
    case '\\': out += "\\\\"; return;
    case '\b': out += "\\b"; return;
    case '\f': out += "\\f"; return;
    case '\n': out += "\\n"; return;
    case '\r': out += "\\r"; return;
    case '\t': out += "\\t"; return;
    default:
      if (byte >= 0x20) {
        out += static_cast<char>(byte);
      } else {
        out += "\\u00";
        out += HEX[byte >> 4];
        out += HEX[byte & 15];
      }
  }
}

// The range of the second byte of a character that begins with `first`, and the character's length.
// The length is 0 if no character begins with `first`. Source: Unicode 15, table 3-7.
struct Lead {
  int length;
  uint8_t low, high;
};

Lead lead_of(uint8_t first) {
  if (first < 0xc2 || first > 0xf4) return {0, 0, 0};
  if (first < 0xe0) return {2, 0x80, 0xbf};
  if (first < 0xf0) {
    return {3, static_cast<uint8_t>(first == 0xe0 ? 0xa0 : 0x80),
            static_cast<uint8_t>(first == 0xed ? 0x9f : 0xbf)};
  }
  return {4, static_cast<uint8_t>(first == 0xf0 ? 0x90 : 0x80),
          static_cast<uint8_t>(first == 0xf4 ? 0x8f : 0xbf)};
}

// True for the first two bytes of a surrogate, which is not a character. For such bytes, Python's
// decoder still waits for the third byte.
bool is_open_surrogate(std::string_view bytes) {
  return bytes.size() == 2 && bytes[0] == '\xed' && (bytes[1] & 0xe0) == 0xa0;
}

// Adds bytes of UTF-8 to a JSON string. Bytes that begin no character, or a truncated character,
// become one replacement character, as in Python's decoder. An incomplete character at the end is
// not added. Returns its length.
size_t add_text(std::string_view bytes, std::string& out) {
  size_t at = 0;
  while (at < bytes.size()) {
    const auto first = static_cast<uint8_t>(bytes[at]);
    if (first < 0x80) {
      escape(first, out);
      ++at;
      continue;
    }
    const Lead lead = lead_of(first);
    size_t good = 1;
    while (lead.length && good < static_cast<size_t>(lead.length) && at + good < bytes.size()) {
      const auto next = static_cast<uint8_t>(bytes[at + good]);
      const bool fits = good == 1 ? next >= lead.low && next <= lead.high : (next & 0xc0) == 0x80;
      if (!fits) break;
      ++good;
    }
    if (good == static_cast<size_t>(lead.length)) {
      out += bytes.substr(at, good);
    } else if (lead.length && at + good == bytes.size()) {
      return good;
    } else if (is_open_surrogate(bytes.substr(at))) {
      return 2;
    } else {
      out += REPLACEMENT;
    }
    at += good;
  }
  return 0;
}

// The unsent part of the chunk of text or message number `place`, as a range of the output.
struct Rest {
  int64_t place, begin, end;
};

struct TextStream;

// The result of handling a frame. The same structure as `TakenFrame` in router/text/native.py.
struct TakenFrame {
  int64_t num_messages;
  int64_t num_taken;               // handled messages
  int64_t num_tokens;              // tokens in the handled messages
  const TextStream* const* taken;  // stream of each message; null: not handled
  int64_t num_rests;
  const Rest* rests;  // parts of chunks that sockets did not accept at once
  const char* out;    // the output that contains the ranges `rests`
};

// Returns the kernel's unique number of a socket (its cookie); 0 if the socket is closed, or has
// none.
uint64_t cookie_of(int32_t socket) {
  uint64_t cookie = 0;
  socklen_t size = sizeof cookie;
  return ::getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) ? 0 : cookie;
}

// A stream that gets its tokens from the frames of its worker. After its connection has closed, the
// descriptor may belong to another connection before Python closes this stream. The cookie reveals
// that.
struct TextStream {
  Text* text;
  int32_t socket;
  uint64_t cookie;
  int64_t number;       // Python's number of the stream
  int64_t held_in = 0;  // number of the last frame with another message of the sequence

  int32_t own_socket() const { return cookie_of(socket) == cookie ? socket : -1; }
};

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};

struct Step {
  std::string out;      // all chunks, one after the other
  std::string escaped;  // text of the present chunk
  std::string joined;   // the first bytes of a character, with the bytes that may complete it
  std::unordered_map<std::string, TextStream, Hash, std::equal_to<>> streams;  // by sequence id
  FrameParser frame;
  int64_t num_frames = 0;
  std::vector<const TextStream*> taken;  // stream of each message; null: left to Python
  std::vector<Rest> rests;

  const TextStream* stream_at(int64_t place) const { return taken[static_cast<size_t>(place)]; }

  // Adds the chunk of a text's next tokens to the output. Returns its range.
  Rest add_chunk(Text& text, int64_t place, const int64_t* ids, int64_t num_ids, double now_s) {
    const auto begin = static_cast<int64_t>(out.size());
    text.gaps->observe(now_s - text.last_s);
    text.last_s = now_s;
    text.num_batched += num_ids;
    for (int64_t j = 0; j < num_ids; ++j) take(text, ids[j]);
    close_chunk(text);
    return {place, begin, static_cast<int64_t>(out.size())};
  }

  void take(Text& text, int64_t id) {
    text.num_tokens += 1;
    if (text.hides(id)) return;
    const std::string_view bytes = text.vocabulary->bytes_of(id, text.shows_special);
    if (bytes.empty()) return;
    std::string_view whole = bytes;
    if (text.rest_len) {
      joined.assign(reinterpret_cast<const char*>(text.rest), static_cast<size_t>(text.rest_len));
      whole = joined.append(bytes);
    }
    const size_t rest = add_text(whole, escaped);
    text.rest_len = static_cast<int32_t>(rest);
    std::memcpy(text.rest, whole.data() + whole.size() - rest, rest);
  }

  void close_chunk(const Text& text) {
    if (escaped.empty()) return;
    char length[16];
    const size_t size = static_cast<size_t>(text.before_len + text.after_len) + escaped.size() + 2;
    const auto end = std::to_chars(length, length + sizeof length, size, 16).ptr;
    out.append(length, end).append("\r\n");
    out.append(text.before, static_cast<size_t>(text.before_len));
    out.append("\"").append(escaped).append("\"");
    out.append(text.after, static_cast<size_t>(text.after_len)).append("\r\n");
    escaped.clear();
  }

  // Sends a range of the output, as far as the socket accepts it at once. Returns the unsent range.
  // An error is found when Python sends this range.
  Rest send(int64_t place, int64_t begin, int64_t end, int32_t socket) const {
    if (socket < 0 || begin == end) return {place, begin, end};
    const ssize_t sent = ::send(socket, out.data() + begin, static_cast<size_t>(end - begin),
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    return {place, begin + std::max<int64_t>(sent, 0), end};
  }
};

}  // namespace

extern "C" {

void* baton_text_open() { return new Step; }
void baton_text_close(void* step) { delete static_cast<Step*>(step); }

void* baton_vocabulary_open(const char* bytes, const int64_t* ends, const char* is_special,
                            int64_t size) {
  return new Vocabulary(bytes, ends, is_special, size);
}
void baton_vocabulary_close(void* vocabulary) { delete static_cast<Vocabulary*>(vocabulary); }

// Adds the next tokens of `count` texts: text i gets the next lengths[i] of `ids`, at times_s[i].
// Its chunk is sent to sockets[i], unless this is negative, or did not accept all of an earlier
// chunk. Tokens without text produce no chunk. Unsent bytes are stored in `rests`, which must have
// room for all texts, as ranges of the output. `begin` is set to the start of the output. Returns
// the number of rests.
int64_t baton_text_step(Step* open, Text* const* texts, const int64_t* lengths,
                        const double* times_s, int64_t count, const int64_t* ids, int32_t* sockets,
                        Rest* rests, const char** begin) {
  Step& step = *open;
  step.out.clear();
  for (int64_t i = 0; i < count; ++i) {  // before any is sent, as the output moves while it grows
    rests[i] = step.add_chunk(*texts[i], i, ids, lengths[i], times_s[i]);
    ids += lengths[i];
  }
  int64_t num_rests = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Rest rest = step.send(i, rests[i].begin, rests[i].end, sockets[i]);
    if (rest.begin == rest.end) continue;
    rests[num_rests++] = rest;
    if (sockets[i] >= 0) std::replace(sockets + i + 1, sockets + count, sockets[i], -1);
  }
  *begin = step.out.data();
  return num_rests;
}

// Opens a stream: from now on, the tokens of this sequence in frames go to the text and its socket.
// Returns 0 if the socket is closed, or has no number in the kernel.
int32_t baton_text_stream_open(Step* step, const char* seq_id, int64_t length, Text* text,
                               int32_t socket, int64_t number) {
  const uint64_t cookie = cookie_of(socket);
  if (!cookie) return 0;
  step->streams.insert_or_assign(std::string(seq_id, static_cast<size_t>(length)),
                                 TextStream{text, socket, cookie, number});
  return 1;
}

void baton_text_stream_close(Step* step, const char* seq_id, int64_t length) {
  const auto found = step->streams.find(std::string_view(seq_id, static_cast<size_t>(length)));
  if (found != step->streams.end()) step->streams.erase(found);
}

// Handles the tokens of open streams in a worker's frame, and sends their chunks. Only messages
// with nothing but tokens are handled. Fills the structure `TakenFrame`. Returns 0 if no message
// was handled; then nothing has changed.
int32_t baton_text_frame(Step* open, const char* data, int64_t length, double now_s,
                         TakenFrame* result) {
  Step& step = *open;
  FrameParser& frame = step.frame;
  *result = {};
  if (!frame.read({data, static_cast<size_t>(length)})) return 0;
  step.taken.clear();
  ++step.num_frames;
  for (const auto& message : frame.messages) {
    const auto found = step.streams.find(message.seq_id);
    TextStream* stream = found == step.streams.end() ? nullptr : &found->second;
    if (stream && !message.is_plain) stream->held_in = step.num_frames;
    if (stream && stream->held_in == step.num_frames)
      stream = nullptr;  // Python must handle this message, to keep the order
    step.taken.push_back(stream);
    if (!stream) continue;
    ++result->num_taken;
    result->num_tokens += message.num_ids;
  }
  if (!result->num_taken) return 0;
  step.out.clear();
  step.rests.clear();
  for (size_t i = 0; i < step.taken.size(); ++i) {
    if (!step.taken[i]) continue;
    const auto& message = frame.messages[i];
    step.rests.push_back(step.add_chunk(*step.taken[i]->text, static_cast<int64_t>(i),
                                        frame.ids.data() + message.first_id, message.num_ids,
                                        now_s));
  }
  size_t num_rests = 0;
  for (const Rest& chunk : step.rests) {
    const TextStream* stream = step.stream_at(chunk.place);
    const auto end = step.rests.begin() + static_cast<ptrdiff_t>(num_rests);
    const bool waits = std::any_of(step.rests.begin(), end, [&](const Rest& earlier) {
      return step.stream_at(earlier.place) == stream;
    });
    const Rest rest =
        step.send(chunk.place, chunk.begin, chunk.end, waits ? -1 : stream->own_socket());
    if (rest.begin != rest.end) step.rests[num_rests++] = rest;
  }
  for (size_t i = 0; i < num_rests; ++i) {
    step.rests[i].place = step.stream_at(step.rests[i].place)->number;
  }
  result->num_messages = static_cast<int64_t>(step.taken.size());
  result->taken = step.taken.data();
  result->num_rests = static_cast<int64_t>(num_rests);
  result->rests = step.rests.data();
  result->out = step.out.data();
  return 1;
}

}  // extern "C"
