// Blocks by hash, each with its owners: open addressing in 4,096 shards, each with a capacity of
// its own.
//
// An entry is 16 bytes, and at most three quarters of a shard's entries are in use. A shard grows
// alone. So memory is 21 to 43 bytes per block, and a caller never waits for the growth of more
// than one shard.
//
// Clearing a worker only records the epoch. A shard that was not swept since then is stale: its
// entries may name the worker as an owner. Such an owner counts only if it was not cleared after
// the shard was swept.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "owners.h"

namespace baton {

constexpr int kHashBytes = 16;  // the first eight bytes are the key
constexpr int kShardBits = 12;
constexpr uint32_t kLeastCapacity = 8;
constexpr int kAhead = 12;  // number of blocks whose cache lines are prefetched

struct Entry {
  uint64_t key;  // 0: no entry
  Owners owners;
};

struct Shard {
  Entry* entries = nullptr;
  uint32_t capacity = 0;  // a power of two
  uint32_t count = 0;
  uint32_t swept = 0;  // epoch of the last sweep
};

class Table {
 public:
  Crowds crowds;

  explicit Table(uint64_t seed) : seed_(seed), shards_(size_t{1} << kShardBits) {}
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() {
    for (Shard& shard : shards_) std::free(shard.entries);
  }

  // Returns a free slot; kMaxSlots if there is none.
  Slot open_slot() {
    Slot slot = static_cast<Slot>(cleared_.size());
    if (!free_slots_.empty()) {
      slot = free_slots_.back();
      free_slots_.pop_back();
    } else if (slot < kMaxSlots) {
      cleared_.push_back(0);
      num_held_.push_back(0);
      crowds.num_slots = slot + 1;
    }
    return slot;
  }

  void close_slot(Slot slot) {
    clear(slot);
    free_slots_.push_back(slot);
  }

  void clear(Slot slot) {
    if (num_held_[slot] == 0) return;
    cleared_[slot] = ++epoch_;
    num_held_[slot] = 0;
  }

  void store(Slot slot, const uint8_t* hashes, int64_t count) {
    each_key(hashes, count, [&](uint64_t key) {
      Entry& entry = entry_for(key);
      if (crowds.contains(entry.owners, slot)) return true;
      entry.owners = crowds.with(entry.owners, slot);
      ++num_held_[slot];
      return true;
    });
  }

  void remove(Slot slot, const uint8_t* hashes, int64_t count) {
    each_key(hashes, count, [&](uint64_t key) {
      Shard& shard = swept_shard(key);
      Entry* entry = find(shard, key);
      if (entry == nullptr || !crowds.contains(entry->owners, slot)) return true;
      entry->owners = crowds.without(entry->owners, slot);
      --num_held_[slot];
      if (entry->owners == kNobody) erase(shard, entry);
      return true;
    });
  }

  // Calls `visit(owners)` for each block until a block has no owner or `visit` returns false.
  template <class Visit>
  void walk(const uint8_t* hashes, int64_t count, Visit visit) {
    each_key(hashes, count, [&](uint64_t key) {
      Shard& shard = shards_[key >> (64 - kShardBits)];
      Entry* entry = find(shard, key);
      if (entry == nullptr) return false;
      if (shard.swept != epoch_) entry->owners = fresh(shard, entry->owners);
      return entry->owners != kNobody && visit(entry->owners);
    });
  }

  int64_t num_slots() const { return static_cast<int64_t>(cleared_.size()); }
  int64_t num_held(Slot slot) const { return num_held_[slot]; }

  // Returns the number of entries. Entries without owners count until their shard is swept.
  int64_t num_blocks() const {
    int64_t total = 0;
    for (const Shard& shard : shards_) total += shard.count;
    return total;
  }

  int64_t num_bytes() const {
    int64_t total = sizeof(Table) + crowds.num_bytes();
    total += static_cast<int64_t>(shards_.capacity() * sizeof(Shard));
    for (const Shard& shard : shards_) total += int64_t{shard.capacity} * sizeof(Entry);
    return total + static_cast<int64_t>(cleared_.capacity() * 12 + free_slots_.capacity() * 4);
  }

  // Sweeps all shards. Returns true if every entry can be found, and all counts are right.
  bool is_sound() {
    std::vector<int64_t> held(cleared_.size());
    int64_t num_crowds = 0;
    for (Shard& shard : shards_) {
      sweep(shard);
      uint32_t count = 0;
      for (uint32_t i = 0; i < shard.capacity; ++i) {
        const Entry& entry = shard.entries[i];
        if (entry.key == 0) continue;
        ++count;
        num_crowds += is_crowd(entry.owners);
        if (find(shard, entry.key) != &entry || entry.owners == kNobody) return false;
        if (&shards_[entry.key >> (64 - kShardBits)] != &shard) return false;
        crowds.each(entry.owners, [&](Slot slot) { ++held[slot]; });
      }
      if (count != shard.count || count * 4 > shard.capacity * 3) return false;
    }
    return held == num_held_ && num_crowds == crowds.num_crowds();
  }

 private:
  uint64_t seed_;
  std::vector<Shard> shards_;
  uint32_t epoch_ = 0;
  std::vector<uint32_t> cleared_;  // by slot: epoch in which the worker was last cleared
  std::vector<int64_t> num_held_;
  std::vector<Slot> free_slots_;

  // Mixes the key with a seed, so that clients cannot send prompts whose blocks share a shard.
  uint64_t key_at(const uint8_t* hashes, int64_t i) const {
    uint64_t key;
    std::memcpy(&key, hashes + i * kHashBytes, sizeof key);
    key ^= seed_;
    key = (key ^ key >> 33) * 0xff51afd7ed558ccdull;
    key = (key ^ key >> 33) * 0xc4ceb9fe1a85ec53ull;
    key ^= key >> 33;
    return key ? key : 1;
  }

  template <class Visit>
  void each_key(const uint8_t* hashes, int64_t count, Visit visit) {
    uint64_t keys[kAhead];  // a ring
    for (int64_t i = 0; i < std::min<int64_t>(count, kAhead); ++i)
      ask_for(keys[i] = key_at(hashes, i));
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t key = keys[i % kAhead];
      if (i + kAhead < count) ask_for(keys[i % kAhead] = key_at(hashes, i + kAhead));
      if (!visit(key)) return;
    }
  }

  void ask_for(uint64_t key) const {
    const Shard& shard = shards_[key >> (64 - kShardBits)];
    if (shard.entries) __builtin_prefetch(shard.entries + (key & (shard.capacity - 1)), 0, 3);
  }

  static Entry* find(Shard& shard, uint64_t key) {
    if (shard.count == 0) return nullptr;
    const uint32_t mask = shard.capacity - 1;
    for (uint32_t i = key & mask;; i = (i + 1) & mask) {
      if (shard.entries[i].key == key) return shard.entries + i;
      if (shard.entries[i].key == 0) return nullptr;
    }
  }

  static Entry* place(Shard& shard, uint64_t key) {
    const uint32_t mask = shard.capacity - 1;
    uint32_t i = key & mask;
    while (shard.entries[i].key != 0) i = (i + 1) & mask;
    return shard.entries + i;
  }

  Shard& swept_shard(uint64_t key) {
    Shard& shard = shards_[key >> (64 - kShardBits)];
    if (shard.swept != epoch_) sweep(shard);
    return shard;
  }

  Entry& entry_for(uint64_t key) {
    Shard& shard = swept_shard(key);
    if (Entry* entry = find(shard, key)) return *entry;
    if ((shard.count + 1) * 4 > shard.capacity * 3) {
      resize(shard, std::max(kLeastCapacity, shard.capacity * 2));
    }
    Entry* entry = place(shard, key);
    *entry = {key, kNobody};
    ++shard.count;
    return *entry;
  }

  // Moves later entries up, so that no search stops at a gap.
  static void erase(Shard& shard, Entry* entry) {
    const uint32_t mask = shard.capacity - 1;
    uint32_t gap = static_cast<uint32_t>(entry - shard.entries);
    for (uint32_t i = (gap + 1) & mask; shard.entries[i].key != 0; i = (i + 1) & mask) {
      const uint32_t home = shard.entries[i].key & mask;
      if (((i - home) & mask) >= ((i - gap) & mask)) {
        shard.entries[gap] = shard.entries[i];
        gap = i;
      }
    }
    shard.entries[gap].key = 0;
    if (--shard.count * 8 < shard.capacity && shard.capacity > kLeastCapacity) {
      resize(shard, shard.capacity / 2);
    }
  }

  static void resize(Shard& shard, uint32_t capacity) {
    auto* entries = static_cast<Entry*>(std::calloc(capacity, sizeof(Entry)));
    if (entries == nullptr) throw std::bad_alloc();
    Shard moved{entries, capacity, 0, shard.swept};
    for (uint32_t i = 0; i < shard.capacity; ++i) {
      if (shard.entries[i].key == 0 || shard.entries[i].owners == kNobody) continue;
      *place(moved, shard.entries[i].key) = shard.entries[i];
      ++moved.count;
    }
    std::free(shard.entries);
    shard = moved;
  }

  Owners fresh(const Shard& shard, Owners owners) {
    return crowds.filtered(owners, [&](Slot slot) { return cleared_[slot] <= shard.swept; });
  }

  void sweep(Shard& shard) {
    uint32_t num_dead = 0;
    for (uint32_t i = 0; i < shard.capacity; ++i) {
      Entry& entry = shard.entries[i];
      if (entry.key == 0) continue;
      entry.owners = fresh(shard, entry.owners);
      num_dead += entry.owners == kNobody;
    }
    shard.swept = epoch_;
    if (num_dead == 0) return;
    uint32_t capacity = shard.capacity;
    while (capacity > kLeastCapacity && (shard.count - num_dead) * 8 < capacity) capacity /= 2;
    resize(shard, capacity);
  }
};

}  // namespace baton
