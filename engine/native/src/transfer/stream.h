// A sealed stream: messages over one connection, encrypted and authenticated by AEGIS-128L (RFC 10032) of
// libsodium. Its functions come from Python, which finds the library when a process starts.
//
//     kind (4) | bytes (4) | sealed bytes | tag (32)
//
// A *note* is a message of the caller's. A *part* is the next 16 KiB, or the rest, of a record. The
// records that belong together follow the note that names them. The beginning of a message, which lies
// open, is authenticated too. Messages are numbered in each direction; the number is the nonce. So a
// message that was changed, repeated, moved or sent back does not open.
//
// Measured on an EPYC (Zen 4, two cores): AEGIS-128L seals 15 GiB/s within the caches and 8.8 from memory,
// whatever the size of a part, and opens 15 and 12. Prefetching by hand makes it slower.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

#include "records.h"

namespace baton {

// Functions of libsodium; mirrored in stream.py.
struct Cipher {
  int (*seal)(uint8_t* out, uint8_t* tag, unsigned long long* tag_bytes, const uint8_t* in,
              unsigned long long in_bytes, const uint8_t* open, unsigned long long open_bytes,
              const uint8_t* unused, const uint8_t* nonce, const uint8_t* key);
  int (*open)(uint8_t* out, uint8_t* unused, const uint8_t* in, unsigned long long in_bytes,
              const uint8_t* tag, const uint8_t* open, unsigned long long open_bytes,
              const uint8_t* nonce, const uint8_t* key);
};

// The state after a call; mirrored in stream.py.
enum class Stop : int32_t {
  kBlocked = 0,  // the call must be repeated when the connection is ready
  kDone = 1,     // everything is sent
  kMore = 2,     // the budget is used up
  kNote = 3,     // a note has arrived
  kLost = 4,     // the connection is lost
  kBad = 5,      // the received bytes are not the peer's next message
};

enum class Kind : uint32_t { kNote = 1, kPart = 2 };

struct Beginning {
  Kind kind;
  uint32_t num_bytes;
};

constexpr int64_t kBeginningBytes = sizeof(Beginning);
constexpr int64_t kTagBytes = 32;
constexpr int64_t kPartBytes = 16 * 1024;
constexpr int64_t kMaxNoteBytes = 64 * 1024;
constexpr int64_t kLongestBytes = kBeginningBytes + kMaxNoteBytes + kTagBytes;  // of a message
constexpr int64_t kStagedBytes = 512 * 1024;

// Waits a moment until the connection is ready, or until the epoll descriptor `others` reports that
// anything else is ready. If `others` is negative, does not wait. Without this wait, a thread would
// return to Python and be woken for each few parts, which takes twice as long.
inline bool wait_for(int fd, int16_t events, int others) {
  constexpr int kMaxMs = 5;
  if (others < 0) return false;
  pollfd ready[2]{{fd, events, 0}, {others, POLLIN, 0}};
  return poll(ready, 2, kMaxMs) > 0 && ready[0].revents != 0;
}

// Makes a connection readable only after this number of bytes has arrived. A wake-up costs as much
// of the sender's time as sending tens of KiB.
class LowMark {
 public:
  explicit LowMark(int fd) : fd_(fd) {}

  // Returns true if the mark has changed.
  bool set(int64_t num_bytes) {
    const int wanted = static_cast<int>(std::clamp<int64_t>(num_bytes, 1, kMostBytes));
    if (wanted == now_) return false;
    now_ = wanted;
    return setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0;
  }

 private:
  static constexpr int64_t kMostBytes = 256 * 1024;

  int fd_;
  int now_ = 1;
};

// The place in a frame of records at which a stream continues.
struct Position {
  int64_t record = 0, offset = 0;

  int64_t part_bytes(const Records& records) const {
    return std::min(kPartBytes, records.record_bytes - offset);
  }
  void pass(int64_t num_bytes, const Records& records) {
    offset += num_bytes;
    if (offset < records.record_bytes) return;
    offset = 0;
    ++record;
  }
};

// The key of one direction, and the number of its next message.
class Numbered {
 public:
  Numbered(const Cipher& cipher, const uint8_t* key, bool from_source) : cipher_(cipher) {
    std::memcpy(key_, key, sizeof key_);
    nonce_[15] = from_source;
  }

  void seal(uint8_t* message, Kind kind, const uint8_t* bytes, int64_t num_bytes) {
    const Beginning beginning{kind, static_cast<uint32_t>(num_bytes)};
    std::memcpy(message, &beginning, kBeginningBytes);
    uint8_t* sealed = message + kBeginningBytes;
    cipher_.seal(sealed, sealed + num_bytes, nullptr, bytes, static_cast<uint64_t>(num_bytes),
                 message, kBeginningBytes, nullptr, next(), key_);
  }

  bool open(const uint8_t* message, int64_t num_bytes, uint8_t* out) {
    const uint8_t* sealed = message + kBeginningBytes;
    return cipher_.open(out, nullptr, sealed, static_cast<uint64_t>(num_bytes), sealed + num_bytes,
                        message, kBeginningBytes, next(), key_) == 0;
  }

 private:
  const uint8_t* next() {
    std::memcpy(nonce_, &number_, sizeof number_);
    ++number_;
    return nonce_;
  }

  Cipher cipher_;
  uint8_t key_[16];
  uint8_t nonce_[16] = {};
  uint64_t number_ = 0;
};

class Sender {
 public:
  Sender(int fd, const Numbered& box) : fd_(fd), box_(box) {}

  // Seals a note. The records of another frame follow the note. Returns false if there is no room
  // for it.
  bool note(const uint8_t* bytes, int64_t num_bytes) {
    const int64_t needed = kBeginningBytes + num_bytes + kTagBytes;
    if (num_bytes > kMaxNoteBytes || end_ + needed > kStagedBytes) return false;
    box_.seal(staged_.get() + end_, Kind::kNote, bytes, num_bytes);
    end_ += needed;
    at_ = {};
    return true;
  }

  // Sends sealed messages, then seals and sends the frame's records, as far as the connection
  // accepts them.
  Stop send(const Records& records, int64_t count, int64_t budget, int others) {
    for (;;) {
      while (begin_ < end_) {
        const ssize_t sent = ::send(fd_, staged_.get() + begin_, static_cast<size_t>(end_ - begin_),
                                    MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN && count > 0 && wait_for(fd_, POLLOUT, others)) continue;
        if (sent < 0) return errno == EAGAIN ? Stop::kBlocked : Stop::kLost;
        begin_ += sent;
        budget -= sent;
      }
      begin_ = end_ = 0;
      if (at_.record >= count) return Stop::kDone;
      if (budget <= 0) return Stop::kMore;
      while (at_.record < count && end_ + kLongestBytes <= kStagedBytes) seal_part(records);
    }
  }

 private:
  void seal_part(const Records& records) {
    const int64_t num_bytes = at_.part_bytes(records);
    box_.seal(staged_.get() + end_, Kind::kPart, records.row(at_.record) + at_.offset, num_bytes);
    end_ += kBeginningBytes + num_bytes + kTagBytes;
    at_.pass(num_bytes, records);
  }

  int fd_;
  Numbered box_;
  Position at_;
  std::unique_ptr<uint8_t[]> staged_{new uint8_t[kStagedBytes]};  // sealed messages
  int64_t begin_ = 0, end_ = 0;                                   // range of the unsent bytes
};

// The result of one call that receives; mirrored in stream.py.
struct Received {
  const uint8_t* note;  // valid until the next call
  int64_t note_bytes;
  int64_t num_records;  // records of the frame before the note that were opened so far
};

class Receiver {
 public:
  Receiver(int fd, const Numbered& box) : fd_(fd), mark_(fd), box_(box) {}

  // Receives the frame's records, opens them, and writes them to the rows that the ids name, until
  // a note arrives. A record with a negative id is skipped.
  Stop receive(const Records& records, int64_t count, int64_t budget, int others,
               Received* received) {
    received->num_records = at_.record;
    bool was_in_vain = false;
    for (;;) {
      while (is_whole()) {
        const Stop stop = take(records, count, received);
        if (stop != Stop::kDone) return stop;
      }
      if (end_ - begin_ >= kBeginningBytes && !is_expected(records, count)) return Stop::kBad;
      if (budget <= 0) return Stop::kMore;
      std::memmove(staged_.get(), staged_.get() + begin_, static_cast<size_t>(end_ - begin_));
      end_ -= begin_;
      begin_ = 0;
      const ssize_t num =
          ::recv(fd_, staged_.get() + end_, static_cast<size_t>(kStagedBytes - end_), MSG_DONTWAIT);
      if (num < 0 && errno == EINTR) continue;
      if (num < 0 && errno == EAGAIN) {
        if (at_.record < count && !was_in_vain) {
          mark_.set(bytes_to_come(records, count));
          was_in_vain = !wait_for(fd_, POLLIN, others);
        } else if (!mark_.set(1)) {
          return Stop::kBlocked;
        }
        continue;  // an epoll does not report bytes that arrived before the mark was set
      }
      if (num <= 0) return Stop::kLost;
      end_ += num;
      budget -= num;
    }
  }

 private:
  Beginning beginning() const {
    Beginning result;
    std::memcpy(&result, staged_.get() + begin_, kBeginningBytes);
    return result;
  }

  bool is_whole() const {
    const int64_t num = end_ - begin_;
    return num >= kBeginningBytes && num >= kBeginningBytes + beginning().num_bytes + kTagBytes;
  }

  bool is_expected(const Records& records, int64_t count) const {
    const auto [kind, num_bytes] = beginning();
    if (kind == Kind::kNote) return num_bytes <= kMaxNoteBytes;
    return kind == Kind::kPart && at_.record < count && num_bytes == at_.part_bytes(records);
  }

  // The minimum number of bytes that the rest of the frame needs.
  int64_t bytes_to_come(const Records& records, int64_t count) const {
    return (count - at_.record) * records.record_bytes - at_.offset - (end_ - begin_);
  }

  // Opens the next message, all of whose bytes have arrived.
  Stop take(const Records& records, int64_t count, Received* received) {
    if (!is_expected(records, count)) return Stop::kBad;
    const auto [kind, num_bytes] = beginning();
    uint8_t* message = staged_.get() + begin_;
    uint8_t* out = message + kBeginningBytes;
    if (kind == Kind::kPart && records.id(at_.record) >= 0)
      out = records.row(at_.record) + at_.offset;
    if (!box_.open(message, num_bytes, out)) return Stop::kBad;
    begin_ += kBeginningBytes + num_bytes + kTagBytes;
    if (kind == Kind::kPart) {
      at_.pass(num_bytes, records);
      received->num_records = at_.record;
      return Stop::kDone;
    }
    received->note = out;
    received->note_bytes = num_bytes;
    at_ = {};
    return Stop::kNote;
  }

  int fd_;
  LowMark mark_;
  Numbered box_;
  Position at_;
  std::unique_ptr<uint8_t[]> staged_{new uint8_t[kStagedBytes]};
  int64_t begin_ = 0, end_ = 0;  // range of the bytes that were not consumed yet
};

// Both directions of a connection. `is_source`: this end is the source.
struct Stream {
  Stream(int fd, const Cipher& cipher, const uint8_t* key, bool is_source)
      : sender(fd, Numbered(cipher, key, is_source)),
        receiver(fd, Numbered(cipher, key, !is_source)) {}

  Sender sender;
  Receiver receiver;
};

}  // namespace baton
