// The owners of a block: a set of slots, one for each worker, in eight bytes.
//
// Up to four slots are stored in ascending order, in 16 bits each from the lowest bits on. Unused
// bits are 0xFFFF, so equal sets are equal numbers. A larger set is a Crowd, whose number is stored
// above 16 bits of ones. Most blocks have few owners, but every worker has the blocks of the system
// prompt.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace baton {

using Slot = uint32_t;
using Owners = uint64_t;

constexpr uint32_t kMaxSlots = 0xFFFF;  // 0xFFFF is not a slot
constexpr Owners kNobody = ~0ull;
constexpr int kInline = 4;

inline bool is_crowd(Owners owners) { return (owners & 0xFFFF) == 0xFFFF && owners != kNobody; }

inline Slot inline_slot(Owners owners, int i) { return (owners >> (16 * i)) & 0xFFFF; }

inline int inline_count(Owners owners) {
  int count = 0;
  while (count < kInline && inline_slot(owners, count) != 0xFFFF) ++count;
  return count;
}

inline Owners pack(const Slot* slots, int count) {
  Owners owners = kNobody;
  for (int i = count - 1; i >= 0; --i) owners = owners << 16 | slots[i];
  return owners;
}

inline bool bit_at(const uint64_t* bits, size_t num_words, Slot slot) {
  return slot / 64 < num_words && (bits[slot / 64] >> (slot % 64) & 1);
}

// A set with many owners: a sorted list if that is smaller, otherwise a bit for each slot.
struct Crowd {
  std::vector<uint16_t> list;
  std::vector<uint64_t> bits;
  uint32_t count = 0;

  bool is_list() const { return bits.empty(); }

  bool contains(Slot slot) const {
    if (!is_list()) return bit_at(bits.data(), bits.size(), slot);
    return std::binary_search(list.begin(), list.end(), slot);
  }

  template <class Visit>
  void each(Visit visit) const {
    for (uint16_t slot : list) visit(Slot{slot});
    for (size_t word = 0; word < bits.size(); ++word) {
      for (uint64_t rest = bits[word]; rest; rest &= rest - 1) {
        visit(static_cast<Slot>(64 * word + std::countr_zero(rest)));
      }
    }
  }

  void insert(Slot slot, uint32_t num_slots) {
    if (contains(slot)) return;
    ++count;
    if (is_list() && count > num_slots / 16 + kInline) to_bits(num_slots);
    if (is_list()) {
      list.insert(std::lower_bound(list.begin(), list.end(), slot), static_cast<uint16_t>(slot));
      return;
    }
    if (slot / 64 >= bits.size()) bits.resize(slot / 64 + 1);
    bits[slot / 64] |= 1ull << (slot % 64);
  }

  void erase(Slot slot, uint32_t num_slots) {
    if (!contains(slot)) return;
    --count;
    if (is_list()) {
      list.erase(std::lower_bound(list.begin(), list.end(), slot));
      return;
    }
    bits[slot / 64] &= ~(1ull << (slot % 64));
    if (count < num_slots / 32) to_list();
  }

 private:
  void to_bits(uint32_t num_slots) {
    bits.resize((num_slots + 63) / 64);
    for (uint16_t slot : list) {
      if (slot / 64 >= bits.size()) bits.resize(slot / 64 + 1);
      bits[slot / 64] |= 1ull << (slot % 64);
    }
    std::vector<uint16_t>().swap(list);
  }

  void to_list() {
    std::vector<uint16_t> kept;
    kept.reserve(count);
    each([&](Slot slot) { kept.push_back(static_cast<uint16_t>(slot)); });
    std::vector<uint64_t>().swap(bits);
    list.swap(kept);
  }
};

// All crowds. Sets are changed only through this class, because a crowd belongs to one table entry.
class Crowds {
 public:
  uint32_t num_slots = 0;  // number of slots used so far, which is the length of a row of bits

  const Crowd& of(Owners owners) const { return crowds_[owners >> 16]; }

  bool contains(Owners owners, Slot slot) const {
    if (is_crowd(owners)) return of(owners).contains(slot);
    for (int i = 0; i < kInline; ++i) {
      if (inline_slot(owners, i) == slot) return true;
    }
    return false;
  }

  template <class Visit>
  void each(Owners owners, Visit visit) const {
    if (is_crowd(owners)) return of(owners).each(visit);
    const int count = inline_count(owners);
    for (int i = 0; i < count; ++i) visit(inline_slot(owners, i));
  }

  // Returns the set with `slot` added. The set must not contain the slot.
  Owners with(Owners owners, Slot slot) {
    if (is_crowd(owners)) {
      crowds_[owners >> 16].insert(slot, num_slots);
      return owners;
    }
    Slot slots[kInline + 1];
    int count = inline_count(owners), at = count;
    for (int i = 0; i < count; ++i) slots[i] = inline_slot(owners, i);
    for (; at > 0 && slots[at - 1] > slot; --at) slots[at] = slots[at - 1];
    slots[at] = slot;
    if (++count <= kInline) return pack(slots, count);
    const Owners made = make();
    for (int i = 0; i < count; ++i) crowds_[made >> 16].insert(slots[i], num_slots);
    return made;
  }

  // Returns the set with `slot` removed. The set must contain the slot.
  Owners without(Owners owners, Slot slot) {
    if (is_crowd(owners)) {
      crowds_[owners >> 16].erase(slot, num_slots);
      return settled(owners);
    }
    Slot slots[kInline];
    int kept = 0;
    each(owners, [&](Slot other) {
      if (other != slot) slots[kept++] = other;
    });
    return pack(slots, kept);
  }

  template <class Keep>
  Owners filtered(Owners owners, Keep keep) {
    if (!is_crowd(owners)) {
      Slot slots[kInline];
      int kept = 0;
      each(owners, [&](Slot slot) {
        if (keep(slot)) slots[kept++] = slot;
      });
      return pack(slots, kept);
    }
    std::vector<Slot> gone;
    of(owners).each([&](Slot slot) {
      if (!keep(slot)) gone.push_back(slot);
    });
    for (Slot slot : gone) crowds_[owners >> 16].erase(slot, num_slots);
    return settled(owners);
  }

  int64_t num_bytes() const {
    int64_t total = static_cast<int64_t>(crowds_.capacity() * sizeof(Crowd));
    for (const Crowd& crowd : crowds_)
      total += crowd.list.capacity() * 2 + crowd.bits.capacity() * 8;
    return total;
  }

  int64_t num_crowds() const { return static_cast<int64_t>(crowds_.size() - free_.size()); }

 private:
  std::vector<Crowd> crowds_;
  std::vector<uint32_t> free_;

  Owners make() {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(crowds_.size()));
      crowds_.emplace_back();
    }
    const Owners number = free_.back();
    free_.pop_back();
    return number << 16 | 0xFFFF;
  }

  // Stores a crowd that has become small as slots again.
  Owners settled(Owners owners) {
    Crowd& crowd = crowds_[owners >> 16];
    if (crowd.count > kInline) return owners;
    Slot slots[kInline];
    int count = 0;
    crowd.each([&](Slot slot) { slots[count++] = slot; });
    crowd = Crowd();
    free_.push_back(static_cast<uint32_t>(owners >> 16));
    return pack(slots, count);
  }
};

}  // namespace baton
