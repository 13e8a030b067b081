// Finds the number of leading blocks of a prompt that each worker has, for all workers in one walk.
#pragma once

#include <cstdint>
#include <vector>

#include "table.h"

namespace baton {

struct Held {
  Slot slot;
  uint32_t depth;  // number of leading blocks
};

// Workers with the same number of leading blocks, as bits.
struct Layer {
  uint32_t depth;
  std::vector<uint64_t> bits;
};

class Match {
 public:
  std::vector<Held> few;    // worker by worker
  std::vector<Layer> many;  // in the order of depth; only the first `num_many` are valid
  size_t num_many = 0;

  void find(Table& table, const uint8_t* hashes, int64_t count) {
    few.clear();
    num_many = 0;
    depth_ = 0;
    last_ = kNobody;
    table.walk(hashes, count, [&](Owners owners) { return step(table.crowds, owners); });
    if (depth_ == 0) return;
    if (is_list_) {
      for (Slot slot : list_) few.push_back({slot, depth_});
    } else {
      put_aside(bits_);
    }
  }

 private:
  uint32_t depth_ = 0;  // number of blocks that the remaining workers have so far
  Owners last_ = kNobody;
  bool is_list_ = true;
  std::vector<Slot> list_;
  std::vector<uint64_t> bits_, gone_;

  bool step(const Crowds& crowds, Owners owners) {
    if (depth_ == 0) {
      begin(crowds, owners);
    } else if (owners != last_) {  // with equal owners, no worker drops out
      const bool some = is_list_ ? keep_of_list(crowds, owners) : keep_of_bits(crowds, owners);
      if (!some) return false;
    }
    last_ = owners;
    ++depth_;
    return true;
  }

  void begin(const Crowds& crowds, Owners owners) {
    is_list_ = !is_crowd(owners) || crowds.of(owners).is_list();
    if (is_list_) {
      list_.clear();
      crowds.each(owners, [&](Slot slot) { list_.push_back(slot); });
    } else {
      bits_ = crowds.of(owners).bits;
    }
  }

  // Returns true if any worker has this block too. Workers without it are recorded with `depth_`
  // blocks, and removed. If no worker has it, all of them are kept, and recorded at the end of the
  // walk.
  bool keep_of_list(const Crowds& crowds, Owners owners) {
    size_t kept = 0;
    for (size_t i = 0; i < list_.size(); ++i) {
      if (crowds.contains(owners, list_[i])) {
        std::swap(list_[kept++], list_[i]);
      }
    }
    if (kept == 0) return false;
    for (size_t i = kept; i < list_.size(); ++i) few.push_back({list_[i], depth_});
    list_.resize(kept);
    return true;
  }

  bool keep_of_bits(const Crowds& crowds, Owners owners) {
    if (is_crowd(owners) && !crowds.of(owners).is_list()) {
      return keep_common(crowds.of(owners).bits);
    }
    list_.clear();
    gone_ = bits_;
    crowds.each(owners, [&](Slot slot) {
      if (!bit_at(bits_.data(), bits_.size(), slot)) return;
      list_.push_back(slot);
      gone_[slot / 64] &= ~(1ull << (slot % 64));
    });
    if (list_.empty()) return false;
    is_list_ = true;
    put_aside(gone_);
    return true;
  }

  bool keep_common(const std::vector<uint64_t>& others) {
    uint64_t any_kept = 0, any_gone = 0;
    gone_ = bits_;
    const size_t common = std::min(bits_.size(), others.size());
    for (size_t i = 0; i < common; ++i) gone_[i] &= ~others[i];
    for (size_t i = 0; i < bits_.size(); ++i) {
      any_gone |= gone_[i];
      any_kept |= bits_[i] & ~gone_[i];
    }
    if (!any_kept) return false;
    if (!any_gone) return true;
    put_aside(gone_);
    for (size_t i = 0; i < bits_.size(); ++i) bits_[i] &= ~gone_[i];
    return true;
  }

  // Records the depth of these workers. If they are few, each is recorded alone, which is cheaper.
  void put_aside(const std::vector<uint64_t>& bits) {
    uint32_t count = 0;
    for (uint64_t word : bits) count += std::popcount(word);
    if (count > kOneByOne) {
      if (num_many == many.size()) many.emplace_back();
      many[num_many].depth = depth_;
      many[num_many++].bits = bits;
      return;
    }
    for (size_t i = 0; i < bits.size(); ++i) {
      for (uint64_t rest = bits[i]; rest; rest &= rest - 1) {
        few.push_back({static_cast<Slot>(64 * i + std::countr_zero(rest)), depth_});
      }
    }
  }

  static constexpr uint32_t kOneByOne = 32;
};

}  // namespace baton
