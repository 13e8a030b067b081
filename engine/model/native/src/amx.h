// Products of bytes with AMX: 16 rows by 16 columns by 64 inputs in one instruction.
//
// Sums are exact, so their bits are those of any other way to add them. Linux lends the tile registers
// to a process that asks for them. Without its leave, or without AMX, byte products take other
// instructions.
#pragma once

#include "simd.h"

#if BATON_AVX512 && defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__)
#define BATON_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define BATON_AMX 0
#endif

namespace baton {

constexpr int kAmxRows = 16;    // of one register
constexpr int kAmxInputs = 64;  // bytes of a register's row
constexpr int kAmxBlock = 2 * kAmxRows;

#if BATON_AMX

inline bool request_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
// Static: an `inline` variable would be shared by all libraries of a process.
static const bool amx_is_lent = request_amx();
static bool amx_is_used = amx_is_lent;

// While one exists, the thread's eight registers are tiles of 16 rows of 64 bytes.
class AmxTiles {
 public:
  explicit AmxTiles(bool wanted) : wanted_(wanted) {
    if (wanted) _tile_loadconfig(&kConfig);
  }
  ~AmxTiles() {
    if (wanted_) _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static const Config kConfig;
  bool wanted_;
};

// A constant, since gcc drops stores that only _tile_loadconfig reads.
inline constexpr AmxTiles::Config AmxTiles::kConfig;

// c [16 kRowTiles, 32] = a times a panel of 32 columns, [cols / 4][32][4]. a is [16 rows][64] for
// each 64 of `cols` inputs, and so again for the next 16 rows.
template <int kRowTiles, bool kPrefetch = true>
inline void amx_product(const uint8_t* a, const int8_t* panel, int cols, int32_t* c) {
  constexpr int kTileBytes = kAmxRows * kAmxInputs;
  constexpr int kAhead = 8192;
  const uint8_t* second = a + static_cast<size_t>(kAmxRows) * cols;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kRowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < cols; k += kAmxInputs) {
    if constexpr (kPrefetch) {
      const char* ahead = reinterpret_cast<const char*>(panel) + kAhead;
#pragma GCC unroll 32
      for (int line = 0; line < 32; ++line) _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
    }
    _tile_loadd(4, a, 64);
    _tile_loadd(6, panel, 128);
    _tile_loadd(7, panel + 64, 128);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, second, 64);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
      second += kTileBytes;
    }
    a += kTileBytes;
    panel += 2 * kTileBytes;
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 16, 128);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, c + 16 * 32, 128);
    _tile_stored(3, c + 16 * 32 + 16, 128);
  }
}

#else

static bool amx_is_used = false;
constexpr bool amx_is_lent = false;
struct AmxTiles {
  explicit AmxTiles(bool) {}
};
template <int kRowTiles, bool kPrefetch = true>
inline void amx_product(const uint8_t*, const int8_t*, int, int32_t*) {}

#endif

}  // namespace baton
