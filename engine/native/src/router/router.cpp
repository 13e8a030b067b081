// The functions that Python calls through ctypes: see library.py. Callers hold Python's global
// lock, so two threads never call at the same time.
#include "fleet.h"
#include "match.h"
#include "table.h"

using namespace baton;

namespace {

struct Index {
  Table table;
  Match match;
};

// Input and result of a decision, without hashes. For Python, filling a field is cheaper than
// passing an argument.
struct Call {
  Fleet* fleet;
  int64_t num_hashes;
  Request request;
  Decision decision;
};

}  // namespace

extern "C" {

void* baton_index_open(uint64_t seed) { return new Index{Table(seed), {}}; }
void baton_index_close(void* index) { delete static_cast<Index*>(index); }

// Returns the new slot; -1 if there is no free slot.
int32_t baton_index_add(void* index) {
  const uint32_t slot = static_cast<Index*>(index)->table.open_slot();
  return slot < kMaxSlots ? static_cast<int32_t>(slot) : -1;
}

void baton_index_forget(void* index, int32_t slot) {
  static_cast<Index*>(index)->table.close_slot(slot);
}

void baton_index_clear(void* index, int32_t slot) { static_cast<Index*>(index)->table.clear(slot); }

void baton_index_store(void* index, int32_t slot, const uint8_t* hashes, int64_t count) {
  static_cast<Index*>(index)->table.store(slot, hashes, count);
}

void baton_index_remove(void* index, int32_t slot, const uint8_t* hashes, int64_t count) {
  static_cast<Index*>(index)->table.remove(slot, hashes, count);
}

int64_t baton_index_num_held(void* index, int32_t slot) {
  return static_cast<Index*>(index)->table.num_held(slot);
}

int64_t baton_index_num_blocks(void* index) {
  return static_cast<Index*>(index)->table.num_blocks();
}

int64_t baton_index_num_bytes(void* index) { return static_cast<Index*>(index)->table.num_bytes(); }

int32_t baton_index_is_sound(void* index) { return static_cast<Index*>(index)->table.is_sound(); }

// Sets `found` to the slot and the number of blocks of each worker that has any. There must be room
// for all workers.
int64_t baton_index_longest(void* index, const uint8_t* hashes, int64_t count, int32_t* found) {
  auto& [table, match] = *static_cast<Index*>(index);
  match.find(table, hashes, count);
  int64_t num_found = 0;
  const auto put = [&](Slot slot, uint32_t depth) {
    found[2 * num_found] = static_cast<int32_t>(slot);
    found[2 * num_found++ + 1] = static_cast<int32_t>(depth);
  };
  for (const Held& held : match.few) put(held.slot, held.depth);
  for (size_t i = 0; i < match.num_many; ++i) {
    const Layer& layer = match.many[i];
    for (size_t word = 0; word < layer.bits.size(); ++word) {
      for (uint64_t rest = layer.bits[word]; rest; rest &= rest - 1) {
        put(static_cast<Slot>(64 * word + std::countr_zero(rest)), layer.depth);
      }
    }
  }
  return num_found;
}

void* baton_fleet_open(void* index, int64_t block_size, uint64_t seed, const Rule* rule) {
  return new Fleet(static_cast<Index*>(index)->table, block_size, seed, *rule);
}

void baton_fleet_close(void* fleet) { delete static_cast<Fleet*>(fleet); }

void baton_fleet_costs(void* fleet, int32_t number, const Costs* costs) {
  static_cast<Fleet*>(fleet)->set_costs(number, *costs);
}

int32_t baton_fleet_kind(void* fleet, const Kind* kind) {
  return static_cast<Fleet*>(fleet)->add_kind(*kind);
}

void baton_fleet_join(void* fleet, int32_t slot, int32_t kind) {
  static_cast<Fleet*>(fleet)->join(slot, kind);
}

void baton_fleet_leave(void* fleet, int32_t slot) { static_cast<Fleet*>(fleet)->leave(slot); }

void baton_fleet_loads(void* fleet, const News* news, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    static_cast<Fleet*>(fleet)->set_load(static_cast<Slot>(news[i].slot), news[i].load);
  }
}

void baton_fleet_put_store(void* fleet, const Store* store) {
  static_cast<Fleet*>(fleet)->put_store(*store);
}

void baton_fleet_drop_store(void* fleet, int32_t slot) {
  static_cast<Fleet*>(fleet)->drop_store(static_cast<Slot>(slot));
}

void baton_fleet_decide(Call* call, const uint8_t* hashes) {
  call->fleet->decide(hashes, call->num_hashes, call->request, call->decision);
}

int32_t baton_fleet_is_sound(void* fleet) { return static_cast<Fleet*>(fleet)->is_sound(); }

}  // extern "C"
