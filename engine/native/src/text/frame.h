// Reads the tokens in the frames of workers: MessagePack, as `engine.messages` encodes
// `list[ToGateway]`. Other messages are skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

// One message of a frame. `is_plain` is true for a `Tokens` message with only token ids.
struct FrameMessage {
  std::string_view seq_id;
  int64_t first_id = 0;  // index of its first id in `FrameParser::ids`
  int64_t num_ids = 0;
  bool is_plain = false;
};

class FrameParser {
 public:
  std::vector<FrameMessage> messages;
  std::vector<int64_t> ids;  // token ids of all messages

  // Returns false if the frame is not a list of maps, or is truncated.
  bool read(std::string_view frame) {
    messages.clear();
    ids.clear();
    left_ = frame;
    uint64_t count = 0;
    if (!begins(ARRAY, count)) return false;
    for (uint64_t i = 0; i < count; ++i) {
      if (!read_message()) return false;
    }
    return left_.empty();
  }

 private:
  enum Kind { ARRAY, MAP, STRING, UINT, NIL, OTHER };
  static constexpr int MAX_DEPTH = 32;

  bool read_message() {
    uint64_t num_fields = 0;
    if (!begins(MAP, num_fields)) return false;
    FrameMessage message;
    message.first_id = static_cast<int64_t>(ids.size());
    bool is_tokens = false, is_bare = true;
    for (uint64_t i = 0; i < num_fields; ++i) {
      std::string_view name, text;
      if (!take_string(name)) return false;
      uint64_t value = 0;
      if (name == "type" && take_string(text)) {
        is_tokens = text == "Tokens";
      } else if (name == "seq_id" && take_string(text)) {
        message.seq_id = text;
      } else if (is_tokens && name == "token_ids" && begins(ARRAY, value)) {
        for (uint64_t j = 0; j < value; ++j) {
          uint64_t id = 0;
          if (!begins(UINT, id)) return false;
          ids.push_back(static_cast<int64_t>(id));
        }
        message.num_ids = static_cast<int64_t>(value);
      } else if (!take_default(name)) {
        is_bare = false;
        if (!skip(0)) return false;
      }
    }
    message.is_plain = is_tokens && is_bare && message.num_ids > 0;
    messages.push_back(message);
    return true;
  }

  // Skips the value of another field of `Tokens`. Returns false if it is not the default.
  bool take_default(std::string_view name) {
    const std::string_view before = left_;
    uint64_t value = 0;
    const Kind kind = head(value);
    if (name == "finish" && kind == NIL) return true;
    if (name == "logprobs" && kind == ARRAY && !value) return true;
    if ((name == "num_drafted" || name == "num_accepted") && kind == UINT && !value) return true;
    left_ = before;
    return false;
  }

  // Reads the head of a value of this kind. Sets `value` to the length, or to the number itself.
  bool begins(Kind kind, uint64_t& value) {
    const std::string_view before = left_;
    if (head(value) == kind) return true;
    left_ = before;
    return false;
  }

  bool take_string(std::string_view& text) {
    uint64_t length = 0;
    const std::string_view before = left_;
    if (!begins(STRING, length) || length > left_.size()) {
      left_ = before;
      return false;
    }
    text = left_.substr(0, length);
    left_.remove_prefix(length);
    return true;
  }

  // Reads the first bytes of a value; for OTHER, the whole value. Sets `value` as in `begins`.
  Kind head(uint64_t& value) {
    value = 0;
    if (left_.empty()) return OTHER;
    const auto first = static_cast<uint8_t>(left_[0]);
    left_.remove_prefix(1);
    if (first < 0x80) return value = first, UINT;
    if (first < 0x90) return value = first & 15, MAP;
    if (first < 0xa0) return value = first & 15, ARRAY;
    if (first < 0xc0) return value = first & 31, STRING;
    switch (first) {
      case 0xc0: return NIL;
      case 0xcc: return number(1, value) ? UINT : OTHER;
      case 0xcd: return number(2, value) ? UINT : OTHER;
      case 0xce: return number(4, value) ? UINT : OTHER;
      case 0xd9: return number(1, value) ? STRING : OTHER;
      case 0xda: return number(2, value) ? STRING : OTHER;
      case 0xdb: return number(4, value) ? STRING : OTHER;
      case 0xdc: return number(2, value) ? ARRAY : OTHER;
      case 0xdd: return number(4, value) ? ARRAY : OTHER;
      case 0xde: return number(2, value) ? MAP : OTHER;
      case 0xdf: return number(4, value) ? MAP : OTHER;
      default: return OTHER;
    }
  }

  // Reads a big-endian number.
  bool number(size_t num_bytes, uint64_t& value) {
    if (left_.size() < num_bytes) return false;
    for (size_t i = 0; i < num_bytes; ++i) value = value << 8 | static_cast<uint8_t>(left_[i]);
    left_.remove_prefix(num_bytes);
    return true;
  }

  // Skips a whole value.
  bool skip(int depth) {
    if (left_.empty() || depth > MAX_DEPTH) return false;
    const auto first = static_cast<uint8_t>(left_[0]);
    uint64_t value = 0;
    switch (head(value)) {
      case UINT:
      case NIL: return true;
      case STRING: return drop(value);
      case MAP: value *= 2; [[fallthrough]];
      case ARRAY:
        for (uint64_t i = 0; i < value; ++i) {
          if (!skip(depth + 1)) return false;
        }
        return true;
      case OTHER: break;
    }
    if (first >= 0xe0 || first == 0xc2 || first == 0xc3) return true;  // small negative, boolean
    switch (first) {
      case 0xc4: return number(1, value) && drop(value);  // bytes
      case 0xc5: return number(2, value) && drop(value);
      case 0xc6: return number(4, value) && drop(value);
      case 0xca: return drop(4);  // floats
      case 0xcb: return drop(8);
      case 0xcf: return drop(8);  // numbers that are no token ids
      case 0xd0: return drop(1);
      case 0xd1: return drop(2);
      case 0xd2: return drop(4);
      case 0xd3: return drop(8);
      default: return false;
    }
  }

  bool drop(uint64_t num_bytes) {
    if (num_bytes > left_.size()) return false;
    left_.remove_prefix(num_bytes);
    return true;
  }

  std::string_view left_;
};
