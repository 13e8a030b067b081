// Records in memory: rows of bytes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace baton {

// Rows of bytes, and the ids of the chosen rows; mirrored in structs.py. `ids` null: 0 ... count -
// 1.
struct Records {
  uint8_t* bytes;
  int64_t stride;
  int64_t num_records;
  int64_t record_bytes;
  const int64_t* ids;

  int64_t id(int64_t i) const { return ids ? ids[i] : i; }
  uint8_t* row(int64_t i) const { return bytes + id(i) * stride; }

  bool has_all(int64_t count) const {
    if (!ids) return count <= num_records;
    return std::all_of(ids, ids + count, [&](int64_t id) { return id >= 0 && id < num_records; });
  }
  bool has(int64_t offset, int64_t num_bytes) const {
    return offset >= 0 && num_bytes >= 0 && num_bytes <= record_bytes &&
           offset <= record_bytes - num_bytes;
  }
};

}  // namespace baton
