// Measures the peaks of this processor, by loops that only multiply in registers, or only read
// memory.
//
// The loops are written in assembler, because compilers add moves. All threads begin together; the
// measurement ends with the slowest thread.
#include <immintrin.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#define TWICE(x) x x
#define LOOP(body) "1:\n" TWICE(body) "dec %0\njnz 1b\n"
#define REGISTERS                                                                                \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

// Registers 0 … 11 are sums, 12 … 14 are factors. All values are zero. Their only requirement is
// that none is subnormal.
#define SUMS(one) \
  one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11)
#define CLEAR "vzeroall\n"

#if defined(__AVX512F__)
#define FMA(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" #i "\n"
constexpr double kFlopsOfFma = 2 * 16;
#else
#define FMA(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n"
constexpr double kFlopsOfFma = 2 * 8;
#endif

void multiply_floats(int64_t rounds) {
  asm volatile(CLEAR LOOP(SUMS(FMA)) : "+r"(rounds)::REGISTERS);
}

#if defined(__AVX512VNNI__)
#define BYTES(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n"
constexpr double kOpsOfBytes = 2 * 64;
#else  // products, pairs of sums, and their sums; the first two share a register
#define BYTES(i)                           \
  "vpmaddubsw %%ymm12, %%ymm13, %%ymm15\n" \
  "vpmaddwd %%ymm15, %%ymm14, %%ymm15\n"   \
  "vpaddd %%ymm15, %%ymm" #i ", %%ymm" #i "\n"
constexpr double kOpsOfBytes = 2 * 32;
#endif

void multiply_bytes(int64_t rounds) {
  asm volatile(CLEAR LOOP(SUMS(BYTES)) : "+r"(rounds)::REGISTERS);
}

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)

bool has_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTiles;  // constant, since gcc drops stores that only _tile_loadconfig reads

template <bool kBytes>
void multiply_tiles(int64_t rounds) {
  _tile_loadconfig(&kTiles);
  alignas(64) static const uint8_t zeros[1024] = {};
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (; rounds > 0; --rounds) {
    if constexpr (kBytes) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
}

#else

bool has_tiles() { return false; }
template <bool kBytes>
void multiply_tiles(int64_t) {}

#endif

volatile int32_t sink;

// Reads whole cache lines. Without `ahead`, only the processor's own prefetching is used.
void read(const uint8_t* from, int64_t bytes, int64_t ahead) {
  __m256i sums[8] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    if (ahead > 0)
      for (int line = 0; line < 256; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(from) + i + ahead + line, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      sums[j] = _mm256_xor_si256(sums[j],
                                 _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i) + j));
  }
  for (int j = 1; j < 8; ++j) sums[0] = _mm256_xor_si256(sums[0], sums[j]);
  sink = _mm256_extract_epi32(sums[0], 0);
}

template <class Work>
double seconds(int threads, Work work) {
  using Clock = std::chrono::steady_clock;
  std::barrier together(threads);
  std::vector<Clock::time_point> begins(threads), ends(threads);
  const auto run = [&](int thread) {
    work(thread, 1);  // switches the processor's wide units on
    together.arrive_and_wait();
    begins[thread] = Clock::now();
    work(thread, 0);
    ends[thread] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (auto& other : others) other.join();
  auto begin = begins[0], end = ends[0];
  for (int i = 1; i < threads; ++i) {
    begin = std::min(begin, begins[i]);
    end = std::max(end, ends[i]);
  }
  return std::chrono::duration<double>(end - begin).count();
}

template <class Loop>
double rate(int threads, int64_t rounds, double ops_of_round, Loop loop) {
  const double s =
      seconds(threads, [&](int, int warm_up) { loop(warm_up ? rounds / 8 + 1 : rounds); });
  return threads * rounds * ops_of_round / s;
}

}  // namespace

extern "C" {

// Operations per second of `threads` threads; a multiplication and an addition count as two.
double peaks_fp32(int32_t threads, int64_t rounds) {
  return rate(threads, rounds, 2 * 12 * kFlopsOfFma, multiply_floats);
}
double peaks_int8(int32_t threads, int64_t rounds) {
  return rate(threads, rounds, 2 * 12 * kOpsOfBytes, multiply_bytes);
}
// Operations per second of AMX; 0 without AMX.
double peaks_int8_tiles(int32_t threads, int64_t rounds) {
  if (!has_tiles()) return 0;
  return rate(threads, rounds, 4 * 2 * 16.0 * 16 * 64, multiply_tiles<true>);
}
double peaks_bf16_tiles(int32_t threads, int64_t rounds) {
  if (!has_tiles()) return 0;
  return rate(threads, rounds, 4 * 2 * 16.0 * 16 * 32, multiply_tiles<false>);
}

// Bytes per second of `threads` threads that each read their own part of `memory` once. `memory` is
// aligned to 64 bytes.
double peaks_read(int32_t threads, const uint8_t* memory, int64_t bytes, int64_t ahead) {
  const int64_t part = bytes / threads / 256 * 256;
  const double s = seconds(threads, [&](int thread, int warm_up) {
    if (!warm_up) read(memory + thread * part, part, ahead);
  });
  return part * threads / s;
}
}
