// Moves blocks between rows of memory and slots of files, on a thread of its own.
//
// A slot's header is in a table, in another file. A write first clears the header, then writes the
// payload, then the header. So a crash in between leaves an empty slot, never a wrong block.
// Payloads bypass the page cache (O_DIRECT) through io_uring. Headers use the page cache, which
// outlives the process; these writes take microseconds, so the engine's thread waits for them.
//
// A read first fills a buffer of this engine. Only verified bytes are copied to the row, under the
// lock that `cancel` and `close` acquire. So after these functions have returned, nothing is
// written to the row, even if the disk hangs. In the same way, a cancelled write leaves no header:
// its row may be in other use already, and then the payload and its checksum do not belong to the
// block in the header.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <vector>

#include "uring.h"
#include "xxh3.h"

namespace baton {

// One entry of the table; mirrored in format.py.
struct Header {
  uint8_t magic[8];
  uint32_t version, has_parent;
  uint8_t identity[16], hash[16], parent[16];
  uint64_t payload_bytes, payload_checksum, sequence, slot, slab_slots;
  uint8_t reserved[16];
  uint64_t checksum;
};
static_assert(sizeof(Header) == 128);

// XXH3-64. Short input is padded with zeros before it is hashed (see xxh3.h).
inline uint64_t disk_checksum(const uint8_t* bytes, int64_t num_bytes) {
  if (num_bytes >= Xxh3::kFewestBytes) return Xxh3(bytes, num_bytes).digest();
  uint8_t padded[256]{};
  std::memcpy(padded, bytes, num_bytes);
  return Xxh3(padded, sizeof padded).digest();
}

inline uint64_t header_checksum(const Header& header) {
  return disk_checksum(reinterpret_cast<const uint8_t*>(&header), offsetof(Header, checksum));
}

enum Kind : int32_t { kRead = 0, kWrite = 1, kClear = 2 };

// Mirrored in structs.py, with the next two structures.
struct DiskFiles {
  int64_t stride_bytes;  // distance from slot to slot: a multiple of kAlignment
  int64_t payload_bytes;
  int32_t table_fd;
  int32_t done_fd;  // an eventfd that is signalled when there are outcomes
  int32_t depth;    // most concurrent reads and writes
};

struct DiskOperation {
  uint64_t tag;
  int64_t offset;        // offset of the slot in its slab
  int64_t table_offset;  // offset of the slot's header in the table
  uint8_t* row;
  uint64_t checksum;  // the checksum that a read expects
  int32_t slab_fd;
  Kind kind;
  Header header;  // header that a write leaves, without checksums
};

struct DiskOutcome {
  uint64_t tag;
  uint64_t checksum;  // checksum of the written payload
  int64_t error;      // 0, an errno, or one of the next two constants
};

constexpr int64_t kShort = -1;    // the file ends within the slot
constexpr int64_t kDamaged = -2;  // the payload does not have the expected checksum
constexpr int64_t kAlignment = 4096;

class DiskEngine {
 public:
  explicit DiskEngine(const DiskFiles& files) : files_(files), flights_(files.depth) {}
  DiskEngine(const DiskEngine&) = delete;
  DiskEngine& operator=(const DiskEngine&) = delete;

  ~DiskEngine() {
    if (buffers_ != MAP_FAILED) munmap(buffers_, buffers_bytes());
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  // Returns 0 or an errno.
  int open() {
    // One entry for each operation, and one for waking up.
    if (const int error = ring_.open(static_cast<uint32_t>(files_.depth) + 1)) return error;
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return errno;
    buffers_ =
        mmap(nullptr, buffers_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffers_ == MAP_FAILED) return errno;
    for (int32_t i = 0; i < files_.depth; ++i) {
      flights_[i].buffer = static_cast<uint8_t*>(buffers_) + i * files_.stride_bytes;
      idle_.push_back(i);
    }
    return start_thread();
  }

  void submit(const DiskOperation* operations, int64_t count) {
    {
      const std::lock_guard lock(mutex_);
      arrivals_.insert(arrivals_.end(), operations, operations + count);
    }
    signal(wake_fd_);
  }

  int64_t reap(DiskOutcome* outcomes, int64_t most) {
    const std::lock_guard lock(mutex_);
    int64_t count = 0;
    for (; count < most && !outcomes_.empty(); ++count, outcomes_.pop_front()) {
      outcomes[count] = outcomes_.front();
      cancelled_.erase(outcomes_.front().tag);
    }
    return count;
  }

  // The operation still has an outcome. A cancelled read does not write to its row, and a cancelled
  // write leaves no header.
  void cancel(uint64_t tag) {
    const std::lock_guard lock(mutex_);
    cancelled_.insert(tag);
  }

  // Stops reads from writing to their rows. Waits for submitted operations. Returns false if they
  // have not ended in time. Then no header is written any more, and the caller must keep this
  // engine and its files as they are.
  bool close(double timeout_s) {
    std::unique_lock lock(mutex_);
    is_closing_ = true;
    signal(wake_fd_);
    const std::chrono::duration<double> timeout(timeout_s);
    is_abandoned_ = !ended_.wait_for(lock, timeout, [&] { return has_ended_; });
    if (is_abandoned_) return false;
    lock.unlock();
    thread_.join();
    return true;
  }

 private:
  struct Flight {
    DiskOperation operation;
    uint8_t* buffer;  // aligned buffer of this operation
    uint8_t* bytes;   // the bytes to read or write: the buffer, or a row that is aligned itself
    int64_t num_done;
    uint64_t checksum;
  };
  static constexpr uint64_t kWake = UINT64_MAX;  // the user_data of the read of `wake_fd_`

  size_t buffers_bytes() const {
    return static_cast<size_t>(files_.depth) * static_cast<size_t>(files_.stride_bytes);
  }

  static void signal(int fd) {
    const uint64_t one = 1;
    // This write fails only if 2^64 signals already wait.
    [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
  }

  int start_thread() {
    sigset_t all, before;  // only Python's main thread handles signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& refused) {
      error = refused.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
  }

  void run() {
    await_wake();
    while (start_arrivals()) {
      const int error = ring_.enter(1);
      if (error && error != EINTR && error != EAGAIN && error != EBUSY) std::abort();  // a bug
      ring_.take_completions([this](uint64_t user_data, int32_t result) {
        if (user_data == kWake) {
          await_wake();
        } else {
          advance(flights_[user_data], result);
        }
      });
    }
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    ended_.notify_all();
  }

  void await_wake() {
    ring_.push(IORING_OP_READ, wake_fd_, &num_wakes_, sizeof num_wakes_, 0, kWake);
  }

  // Returns false if all operations have ended and no further ones may start.
  bool start_arrivals() {
    for (DiskOperation operation; take_arrival(operation);) start(operation);
    const std::lock_guard lock(mutex_);
    return !(is_closing_ && arrivals_.empty() && idle_.size() == flights_.size());
  }

  bool take_arrival(DiskOperation& operation) {
    const std::lock_guard lock(mutex_);
    if (is_abandoned_) arrivals_.clear();
    if (arrivals_.empty() || idle_.empty()) return false;
    operation = arrivals_.front();
    arrivals_.pop_front();
    return true;
  }

  void start(const DiskOperation& operation) {
    const int32_t index = idle_.back();
    idle_.pop_back();
    Flight& flight = flights_[index];
    flight.operation = operation;
    flight.num_done = 0;
    flight.checksum = 0;
    flight.bytes = flight.buffer;
    if (operation.kind != kRead) {
      const Header empty{};
      const int64_t error = write_header(operation, empty);
      if (error || operation.kind == kClear) return end(flight, error);
      prepare_payload(flight);
    }
    request(flight);
    // The next step needs processor time, so the disk starts first.
    ring_.enter(0);
  }

  void prepare_payload(Flight& flight) const {
    uint8_t* row = flight.operation.row;
    const int64_t num_bytes = files_.payload_bytes;
    if (num_bytes == files_.stride_bytes && reinterpret_cast<uintptr_t>(row) % kAlignment == 0) {
      flight.bytes = row;
    } else {
      std::memcpy(flight.buffer, row, num_bytes);
      std::memset(flight.buffer + num_bytes, 0, files_.stride_bytes - num_bytes);
    }
    flight.checksum = disk_checksum(flight.bytes, num_bytes);
  }

  // Submits the part of an operation that is not done yet to the kernel.
  void request(const Flight& flight) {
    const DiskOperation& operation = flight.operation;
    ring_.push(operation.kind == kRead ? IORING_OP_READ : IORING_OP_WRITE, operation.slab_fd,
               flight.bytes + flight.num_done,
               static_cast<uint32_t>(files_.stride_bytes - flight.num_done),
               operation.offset + flight.num_done, &flight - flights_.data());
  }

  void advance(Flight& flight, int32_t result) {
    if (result == -EINTR || result == -EAGAIN) return request(flight);
    if (result < 0) return end(flight, -result);
    flight.num_done += result;
    if (flight.num_done < files_.stride_bytes) {
      if (result == 0 || result % kAlignment) return end(flight, kShort);
      return request(flight);
    }
    end(flight, flight.operation.kind == kRead ? deliver(flight) : write_final_header(flight));
  }

  int64_t deliver(const Flight& flight) {
    const DiskOperation& operation = flight.operation;
    if (disk_checksum(flight.buffer, files_.payload_bytes) != operation.checksum) return kDamaged;
    const std::lock_guard lock(mutex_);
    if (is_closing_ || cancelled_.contains(operation.tag)) return ECANCELED;
    std::memcpy(operation.row, flight.buffer, files_.payload_bytes);
    return 0;
  }

  int64_t write_final_header(const Flight& flight) {
    {
      const std::lock_guard lock(mutex_);
      if (is_abandoned_ || cancelled_.contains(flight.operation.tag)) return ECANCELED;
    }
    Header header = flight.operation.header;
    header.payload_checksum = flight.checksum;
    header.checksum = header_checksum(header);
    return write_header(flight.operation, header);
  }

  int64_t write_header(const DiskOperation& operation, const Header& header) const {
    const ssize_t written = pwrite(files_.table_fd, &header, sizeof header, operation.table_offset);
    if (written < 0) return errno;
    return written == sizeof header ? 0 : kShort;
  }

  void end(const Flight& flight, int64_t error) {
    {
      const std::lock_guard lock(mutex_);
      outcomes_.push_back({flight.operation.tag, flight.checksum, error});
      idle_.push_back(static_cast<int32_t>(&flight - flights_.data()));
    }
    signal(files_.done_fd);
  }

  const DiskFiles files_;
  Ring ring_;
  int wake_fd_ = -1;
  uint64_t num_wakes_ = 0;
  void* buffers_ = MAP_FAILED;
  std::vector<Flight> flights_;
  std::vector<int32_t> idle_;  // idle flights; only the engine's thread uses them
  std::thread thread_;

  std::mutex mutex_;  // guards all fields below
  std::deque<DiskOperation> arrivals_;
  std::deque<DiskOutcome> outcomes_;
  std::unordered_set<uint64_t> cancelled_;
  bool is_closing_ = false, is_abandoned_ = false, has_ended_ = false;
  std::condition_variable ended_;
};

}  // namespace baton
