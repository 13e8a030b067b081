// Products with AMX: one instruction multiplies 16 rows by 16 columns, over 64 bytes of inputs.
//
// Sums of byte products are exact, so their bits do not depend on the order of additions. Sums of
// bf16 products are fp32 with AMX's own rounding, so a matrix is packed either for AMX or for other
// instructions. Linux gives a process the tile registers on request.
#pragma once

#include <type_traits>

#include "simd.h"

#if BATON_AVX512 && defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && \
    defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__linux__)
#define BATON_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define BATON_AMX 0
#endif

namespace baton {

constexpr int kAmxRows = 16;    // rows of one register
constexpr int kAmxInputs = 64;  // bytes of a register's row
constexpr int kAmxBlock = 2 * kAmxRows;

// A float is exactly the sum of three bf16 numbers, unless it is almost zero. So a product of
// floats with bf16 weights becomes three bf16 products. Each part of a row is a row of its own. The
// products of the parts are added at the end.
constexpr int kParts = 3;
constexpr int kFloatRows = kAmxRows / kParts;  // rows of floats in one register
constexpr int kFloatBlock = 2 * kFloatRows;

#if BATON_AMX

inline bool request_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
// Hidden, because otherwise all libraries of a process would share this variable.
[[gnu::visibility("hidden")]] inline const bool amx_is_lent = request_amx();
[[gnu::visibility("hidden")]] inline bool amx_is_used = amx_is_lent;

// While an object exists, the eight registers of this thread are tiles of 16 rows of 64 bytes.
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

// A constant, because gcc drops stores that only _tile_loadconfig reads.
inline constexpr AmxTiles::Config AmxTiles::kConfig;

// Multiplies a by a panel of 32 columns. a is [16 rows][64 bytes] for each 64 of `row_bytes`,
// repeated for each further 16 rows. Bytes: the panel is [inputs / 4][32][4], sums are int32_t.
// bf16: the panel is [inputs / 2][32][2], sums are float. The sums [16 kRowTiles, 32] stay in
// registers. If a panel is read `once`, a stays in the L1 cache. Calls meanwhile(i) after the i-th
// 64 bytes, for work of other units of the processor while AMX multiplies.
template <int kRowTiles, bool kFloat, class Meanwhile>
BATON_INLINE void amx_multiply(const uint8_t* a, const uint8_t* panel, int row_bytes, bool once,
                               Meanwhile meanwhile) {
  constexpr int kTileBytes = kAmxRows * kAmxInputs;
  const uint8_t* second = a + static_cast<size_t>(kAmxRows) * row_bytes;
  asm volatile("" ::: "memory");  // gcc does not know that tiles are loaded from memory
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kRowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < row_bytes / kAmxInputs; ++k) {
    _tile_loadd(4, a, 64);
    if (once) {
      _tile_stream_loadd(6, panel, 128);
      _tile_stream_loadd(7, panel + 64, 128);
    } else {
      _tile_loadd(6, panel, 128);
      _tile_loadd(7, panel + 64, 128);
    }
    if constexpr (kFloat) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    } else {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, second, 64);
      if constexpr (kFloat) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      }
      second += kTileBytes;
    }
    meanwhile(k);
    a += kTileBytes;
    panel += 2 * kTileBytes;
  }
}

// Writes the sums from the registers to memory.
template <int kRowTiles, class Sum>
BATON_INLINE void amx_store(Sum* sums) {
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
}

// Multiplies 16 rows of 64 bytes by two panels of 64 bytes each. The panels' sums stay in
// registers, one after the other.
BATON_INLINE void amx_multiply_by_two(const uint8_t* a, const uint8_t* first,
                                      const uint8_t* second) {
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, a, 64);
  _tile_loadd(6, first, 128);
  _tile_loadd(7, first + 64, 128);
  _tile_dpbusd(0, 4, 6);
  _tile_dpbusd(1, 4, 7);
  _tile_loadd(6, second, 128);
  _tile_loadd(7, second + 64, 128);
  _tile_dpbusd(2, 4, 6);
  _tile_dpbusd(3, 4, 7);
}

// Writes sixteen floats as three rows of bf16 numbers, which add up to the floats: to, to + 64, to
// + 128.
inline void put_parts(const float* x, uint8_t* to) {
  Vec rest = load(x);
  for (int part = 0; part < kParts; ++part, to += kAmxInputs) {
    const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(rest));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    rest = sub(rest, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
}

#else

[[gnu::visibility("hidden")]] inline bool amx_is_used = false;
constexpr bool amx_is_lent = false;
struct AmxTiles {
  explicit AmxTiles(bool) {}
};
template <int kRowTiles, bool kFloat, class Meanwhile>
inline void amx_multiply(const uint8_t*, const uint8_t*, int, bool, Meanwhile) {}
template <int kRowTiles, class Sum>
inline void amx_store(Sum*) {}
inline void put_parts(const float*, uint8_t*) {}

#endif

}  // namespace baton
