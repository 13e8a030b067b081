// A ring of Linux's io_uring, used through system calls. Only one thread may use it.
//
// Layout and memory order: io_uring_setup(2), io_uring_enter(2). The kernel writes the head of the
// submission queue and the tail of the completion queue. This code writes the tail of the
// submission queue and the head of the completion queue.
#pragma once

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace baton {

class Ring {
 public:
  // One mapping of both queues (Linux 5.4), no completion is lost (5.5), plain reads (5.6).
  static constexpr uint32_t kNeeded =
      IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;

  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() {
    if (entries_ != MAP_FAILED) munmap(entries_, entries_bytes_);
    if (queues_ != MAP_FAILED) munmap(queues_, queues_bytes_);
    if (fd_ >= 0) ::close(fd_);
  }

  // Opens a ring for at most `num_entries` operations at a time. Returns 0 or an errno.
  int open(uint32_t num_entries) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, num_entries, &params));
    if (fd_ < 0) return errno;
    if ((params.features & kNeeded) != kNeeded) return ENOSYS;
    const auto& sq = params.sq_off;
    const auto& cq = params.cq_off;
    const size_t sq_bytes = sq.array + params.sq_entries * sizeof(uint32_t);
    const size_t cq_bytes = cq.cqes + params.cq_entries * sizeof(io_uring_cqe);
    queues_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    queues_ = map(queues_bytes_, IORING_OFF_SQ_RING);
    entries_ = map(entries_bytes_, IORING_OFF_SQES);
    if (queues_ == MAP_FAILED || entries_ == MAP_FAILED) return errno;
    sq_tail_ = at<uint32_t>(sq.tail);
    sq_mask_ = *at<uint32_t>(sq.ring_mask);
    sq_array_ = at<uint32_t>(sq.array);
    cq_head_ = at<uint32_t>(cq.head);
    cq_tail_ = at<uint32_t>(cq.tail);
    cq_mask_ = *at<uint32_t>(cq.ring_mask);
    completions_ = at<io_uring_cqe>(cq.cqes);
    return 0;
  }

  // Queues a read or write. The completion contains `user_data` and the result.
  void push(uint8_t opcode, int fd, void* bytes, uint32_t num_bytes, uint64_t offset,
            uint64_t user_data) {
    const uint32_t tail = *sq_tail_, index = tail & sq_mask_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[index];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = opcode;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(bytes);
    entry.len = num_bytes;
    entry.off = offset;
    entry.user_data = user_data;
    sq_array_[index] = index;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++num_queued_;
  }

  // Submits the queued operations and waits for `num_wanted` completions. Returns 0 or an errno.
  int enter(uint32_t num_wanted) {
    const long taken = syscall(__NR_io_uring_enter, fd_, num_queued_, num_wanted,
                               num_wanted ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    if (taken < 0) return errno;
    num_queued_ -= static_cast<uint32_t>(taken);
    return 0;
  }

  // Calls `handle(user_data, result)` for each completion that has arrived. `handle` may call
  // `push`.
  template <class Handle>
  void take_completions(Handle handle) {
    for (uint32_t head = *cq_head_; head != load(cq_tail_);) {
      const io_uring_cqe completion = completions_[head & cq_mask_];
      std::atomic_ref(*cq_head_).store(++head, std::memory_order_release);
      handle(completion.user_data, completion.res);
    }
  }

 private:
  void* map(size_t num_bytes, uint64_t offset) const {
    return mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                static_cast<off_t>(offset));
  }
  template <class T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(queues_) + offset);
  }
  static uint32_t load(uint32_t* number) {
    return std::atomic_ref(*number).load(std::memory_order_acquire);
  }

  int fd_ = -1;
  void* queues_ = MAP_FAILED;
  void* entries_ = MAP_FAILED;
  size_t queues_bytes_ = 0, entries_bytes_ = 0;
  uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0, num_queued_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

}  // namespace baton
