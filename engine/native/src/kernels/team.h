// Threads that run one function together, with barriers inside the function.
//
// OpenMP could do this, but a worker's forward pass has a hundred parallel phases of a few
// microseconds, and OpenMP's runtime is shared with torch. Here a pass is one job, with barriers
// between phases. A barrier spins for a while and then yields, so other processes can use the
// cores.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace baton {

class Team {
 public:
  using Job = void (*)(void* context, int thread);

  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    job_ = nullptr;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs job(context, i) for every thread i. The caller is thread 0.
  void run(Job job, void* context) {
    if (size_ > 1) {
      job_ = job;
      context_ = context;
      epoch_.fetch_add(1, std::memory_order_release);
      epoch_.notify_all();
    }
    job(context, 0);
    barrier();
  }

  // Returns after all threads have arrived. Each thread then sees all earlier writes of the others.
  void barrier() {
    if (size_ == 1) return;
    uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; round_.load(std::memory_order_acquire) == round; ++i) pause(i);
  }

  // A counter that assigns tasks to threads; thread 0 resets it before a barrier.
  std::atomic<int> next_task{0};

 private:
  // Cycles for which a thread spins before it sleeps: about the time between two decoding steps.
  // Waking up takes five times as long as receiving a job while spinning.
  static constexpr uint64_t kSpun = 250'000;
  // Spins at a barrier before a thread yields. With fewer free cores than threads, two threads
  // share a core, and a spinning thread delays the thread for which it waits.
  static constexpr int kBarrierSpins = 100;

  static void pause(int i) {
    if (i < kBarrierSpins) _mm_pause();
    else sched_yield();
  }

  void serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
      const uint64_t begin = __rdtsc();
      while (epoch_.load(std::memory_order_acquire) == seen && __rdtsc() - begin < kSpun)
        _mm_pause();
      epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      if (job_ == nullptr) return;
      job_(context_, thread);
      barrier();
    }
  }

  int size_;
  std::vector<std::thread> threads_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
};

// A thread's part [begin, end) of `count` items, divided equally.
struct Share {
  int begin, end;
  Share(int count, int thread, int size)
      : begin(static_cast<int>(static_cast<int64_t>(count) * thread / size)),
        end(static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / size)) {}
};

}  // namespace baton
