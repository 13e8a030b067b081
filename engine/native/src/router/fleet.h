// Keeps each worker's load, and places requests: one call decides, and reserves the resources.
// router/policies/slo.py explains the rule.
//
// Arrays are indexed by slot, in chunks of 64 slots. Each chunk has a lower bound of its minimum. A
// chunk is skipped if this bound is above the cost of the best worker so far.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "match.h"
#include "table.h"

namespace baton {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kChunk = 64;
constexpr int kMaxKinds = 256;
constexpr int32_t kNone = -1;
constexpr int kMedia = 3;  // memory, disk and objects: router/native/index.py

// Costs of a class of workers, in seconds. n: tokens, p: cached tokens, k: blocks, b: sequences,
// kv: context tokens.
struct Costs {
  double prefill, prefill_per_token, prefill_per_square;  // A + B(n-p) + C(n²-p²)
  double decode, decode_per_seq, decode_per_token;        // D + E·b + F·kv
  double pull, pull_per_block;                            // t0 + k·t_block

  double prefill_s(double n, double p) const {
    return prefill + prefill_per_token * (n - p) + prefill_per_square * (n * n - p * p);
  }
};

// Properties of workers besides costs. The workers of one group have the same blocks for the same
// prompt, so a worker that pulls may pull blocks from others of its group. A fluid worker has one
// role, but also takes whole requests: prompts may make its steps `stretch` times as long.
struct Kind {
  int32_t costs, group;
  int32_t prefills, decodes, pulls, is_fluid;
  int64_t num_blocks, max_running;
  double stretch;

  bool is_local() const { return is_fluid && decodes; }
};

struct Rule {
  double lend_ratio, lend_share, prompt_weight;  // see router/policies/slo.py
};

struct Request {
  int64_t num_tokens;    // number of tokens to prefill
  int64_t final_tokens;  // predicted final length, prompt included
  int64_t max_tokens;    // maximum length of the sequence
  double now_s;
  double tpot_bound_s, wait_bound_s;  // infinite: no bound
  double offer_s;                     // maximum wait for an offer from a worker that computes
  double queued;                      // other queued requests, per worker that prefills
  double queued_s;                    // their predicted seconds, per worker that prefills
  double busy;                        // share of recent time spent on prompts
  int64_t may_pull;
};

enum Status : int32_t { kPlaced, kNoPrefill, kNoRoom, kTooSlow };

struct Decision {
  int32_t status, prefill, decode, source;
  // Blocks cached at the prefill worker, and blocks to pull from the source.
  int32_t matched_blocks, pulled_blocks;
  int32_t medium;                 // medium of the source; 0: memory
  double wait_s, ttft_s, tpot_s;  // wait_s: until the prefill worker is ready, or the first
  double load_s;                  // until the source has read the blocks it lacks in memory
  double slowdown;                // factor on the prompt's time, because its worker also decodes
};

// The load of a worker.
struct Load {
  double ready_at_s = 0;  // time at which all its prompts are computed
  double behind_s = 0;    // minimum seconds from now, for the prompts after the first
  int64_t running = 0;    // number of sequences that decode or will decode
  int64_t tokens = 0;     // context tokens in the middle of their growth
  int64_t blocks = 0;     // KV blocks at the predicted lengths
  int64_t decoding = 0;   // number of the `running` sequences that decode now
  int64_t decoding_tokens = 0;
};

struct News {
  int64_t slot;
  Load load;
};

struct Worker {
  int32_t kind = kNone;  // kNone: the slot is free
  Load load;
};

// A store keeps blocks for workers and computes nothing, so it is not a `Worker`. The index has a
// slot for each medium of a store. The slot of the first medium identifies the store.
struct Store {
  int32_t group;
  int32_t slots[kMedia];
  double load[kMedia], load_per_block[kMedia];  // seconds to read k blocks: t0 + k·t_block
};

// router/native/fleet.py packs and unpacks these structures.
static_assert(sizeof(Request) == 88 && sizeof(Decision) == 72 && sizeof(News) == 64);
static_assert(sizeof(Store) == 64);

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t below(uint64_t bound) {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(z ^ z >> 31) * bound) >> 64);
  }

 private:
  uint64_t state_;
};

// The cheapest worker so far. Ties are broken at random, with equal probability.
struct Choice {
  double cost = kInf;
  Slot slot = 0;
  uint64_t ties = 0;
  uint32_t depth = 0;

  void offer(double other_cost, Slot other, uint32_t other_depth, Random& random) {
    if (other_cost > cost || other_cost == kInf) return;
    if (other_cost < cost) ties = 0;
    cost = other_cost;
    if (random.below(++ties) == 0) slot = other, depth = other_depth;
  }
};

// The maximum number of leading blocks of the present prompt that can be pulled from one medium,
// and the minimum seconds until a holder of all these blocks has offered and read them.
struct Best {
  uint32_t depth = 0;
  double answers_s = 0, load_s = 0;
};

// Workers and stores that have the same blocks for the same prompt.
struct Group {
  std::vector<uint64_t> members;  // slots of workers as bits
  Best best[kMedia];
};

// A store, with the blocks of the present prompt on each medium. If a faster medium has as many
// blocks, the number is 0.
struct Shelves {
  Store store{};
  bool is_live = false;
  uint32_t depth[kMedia] = {};
  double load_s[kMedia] = {};
};

class Fleet {
 public:
  Fleet(Table& table, int64_t block_size, uint64_t seed, const Rule& rule)
      : table_(table), block_size_(block_size), random_(seed), rule_(rule) {}

  void set_costs(int32_t number, const Costs& costs) {
    if (static_cast<size_t>(number) >= costs_.size()) costs_.resize(number + 1);
    const Costs old = std::exchange(costs_[number], costs);
    if (old.decode == costs.decode && old.decode_per_seq == costs.decode_per_seq &&
        old.decode_per_token == costs.decode_per_token) {
      return;
    }
    for (size_t chunk = 0; chunk < num_chunks(); ++chunk) {
      for (size_t slot = chunk * kChunk; slot < (chunk + 1) * kChunk; ++slot) {
        tpot_[slot] = tpot_now(static_cast<Slot>(slot));
      }
      least_tpot_[chunk] = least(&tpot_[chunk * kChunk]);
    }
  }

  // Returns the number of the kind; kNone if there are too many kinds.
  int32_t add_kind(const Kind& kind) {
    if (kinds_.size() == kMaxKinds) return kNone;
    kinds_.push_back(kind);
    if (static_cast<size_t>(kind.costs) >= costs_.size()) costs_.resize(kind.costs + 1);
    if (kind.group >= static_cast<int32_t>(groups_.size())) groups_.resize(kind.group + 1);
    return static_cast<int32_t>(kinds_.size() - 1);
  }

  void join(Slot slot, int32_t kind) {
    while (slot >= workers_.size()) grow();
    workers_[slot] = {kind, {}};
    kind_of_[slot] = static_cast<uint8_t>(kind);
    note_kinds(slot / kChunk);
    set_bit(mixed_, slot, kinds_[kind].prefills && kinds_[kind].decodes);
    set_bit(locals_, slot, kinds_[kind].is_local());
    set_bit(groups_[kinds_[kind].group].members, slot, true);
    refresh(slot);
  }

  void leave(Slot slot) {
    set_bit(groups_[kind_at(slot).group].members, slot, false);
    set_bit(mixed_, slot, false);
    set_bit(locals_, slot, false);
    workers_[slot] = Worker();
    refresh(slot);
  }

  void put_store(const Store& store) {
    const auto name = static_cast<Slot>(store.slots[0]);
    int32_t number = shelves_at(name);
    if (number == kNone) {
      number = 0;
      while (static_cast<size_t>(number) < shelves_.size() && shelves_[number].is_live) ++number;
      if (static_cast<size_t>(number) == shelves_.size()) shelves_.emplace_back();
      ++num_stores_;
    }
    if (store.group >= static_cast<int32_t>(groups_.size())) groups_.resize(store.group + 1);
    shelves_[number].store = store;
    shelves_[number].is_live = true;
    for (const int32_t slot : store.slots) assign(static_cast<Slot>(slot), number);
  }

  void drop_store(Slot name) {
    const int32_t number = shelves_at(name);
    if (number == kNone) return;
    for (const int32_t slot : shelves_[number].store.slots) assign(static_cast<Slot>(slot), kNone);
    shelves_[number] = Shelves();
    --num_stores_;
  }

  void set_load(Slot slot, const Load& load) {
    workers_[slot].load = load;
    refresh(slot);
  }

  void decide(const uint8_t* hashes, int64_t count, const Request& request, Decision& decision) {
    decision = {kPlaced, kNone, kNone, kNone, 0, 0, 0, 0, 0, 0, 0, 1};
    request_ = &request;
    wait_bound_s_ = request.wait_bound_s;
    need_blocks_ = blocks_for(request.final_tokens);
    Choice decode = choose_decode();
    const bool can_join = decode.cost < kInf && is_kept(decode.cost);
    // A worker computes at least one token, because it samples the answer's first token from it.
    match_.find(table_, hashes, std::min(count, (request.num_tokens - 1) / block_size_));
    find_best();
    Choice prefill = choose_prefill();
    const int64_t num_spared = num_spared_;
    if (can_join) {
      const Choice local = choose_local(prefill.cost);
      if (local.cost < kInf && (prefill.cost < kInf || is_quicker(local, without(num_spared)))) {
        prefill = local;
      }
    }
    if (!can_join) {
      const Choice lender = choose_lender();
      lends_ = true;
      const Choice local = choose_prefill(false);
      lends_ = false;
      const double apart = prefill.cost + lender.cost;
      if (apart == kInf && local.cost == kInf) return refuse(decision, decode);
      const bool is_local =
          local.cost < apart ||
          (local.cost == apart && preference(local.slot) >= preference(lender.slot));
      if (is_local) prefill = local;
      if (should_wait(decision, prefill)) return;
      decode.slot = is_local ? local.slot : lender.slot;
      decode.cost = lent_tpot_s(decode.slot);
      return reserve(decision, fill(decision, prefill, decode));
    }
    if (prefill.cost == kInf && num_spared > 0) prefill = choose_prefill(false);
    if (prefill.cost == kInf) {
      decision.status = kNoPrefill;
      decision.wait_s = soonest_s();
      return;
    }
    if (should_wait(decision, prefill)) return;
    if (kind_at(prefill.slot).decodes) {  // a mixed worker decodes what it prefills
      decode.slot = prefill.slot;
      decode.cost = tpot_s(prefill.slot);
    } else if (gains_if_lent(prefill.slot, decode)) {
      decode.slot = prefill.slot;
      decode.cost = lent_tpot_s(prefill.slot);
    }
    reserve(decision, fill(decision, prefill, decode));
  }

  bool is_sound() const {
    for (Slot slot = 0; slot < workers_.size(); ++slot) {
      if (ready_at_[slot] != ready_at(slot) || tpot_[slot] != tpot_now(slot)) return false;
      if (ready_at_[slot] < least_ready_at_[slot / kChunk]) return false;
      if (tpot_[slot] < least_tpot_[slot / kChunk]) return false;
      if (behind_[slot] != workers_[slot].load.behind_s) return false;
      if (local_ready_at_[slot] != local_ready_at(slot)) return false;
      if (local_ready_at_[slot] < least_local_ready_at_[slot / kChunk]) return false;
      if (workers_[slot].kind != kNone && shelves_at(slot) != kNone) return false;
    }
    size_t num_live = 0;
    for (size_t number = 0; number < shelves_.size(); ++number) {
      if (!shelves_[number].is_live) continue;
      ++num_live;
      for (const int32_t slot : shelves_[number].store.slots) {
        if (shelves_at(static_cast<Slot>(slot)) != static_cast<int32_t>(number)) return false;
      }
    }
    return num_live == num_stores_;
  }

 private:
  Table& table_;
  int64_t block_size_;
  Random random_;
  Rule rule_;
  std::vector<Costs> costs_;
  std::vector<Kind> kinds_;
  std::vector<Worker> workers_;
  // These arrays are indexed by slot, and their sizes are whole chunks.
  // Time at which a prefill worker is ready; infinite for other workers.
  std::vector<double> ready_at_;
  std::vector<double> behind_;
  std::vector<double> tpot_;            // seconds of a step now; infinite: takes no sequence
  std::vector<int64_t> room_;           // number of free blocks
  std::vector<double> local_ready_at_;  // time of fluid decode workers; infinite: other workers
  std::vector<uint8_t> kind_of_;
  // These arrays are indexed by chunk.
  std::vector<double> least_ready_at_, least_tpot_, least_local_ready_at_;
  std::vector<int32_t> kind_in_;  // kind of all workers in the chunk; kNone: they differ
  std::vector<uint64_t> mixed_, locals_, rest_;
  std::vector<uint64_t> lenders_;  // prefill workers that decode
  std::vector<Group> groups_;
  std::vector<Shelves> shelves_;
  std::vector<int32_t> shelves_at_;    // by slot: index in `shelves_`
  std::vector<uint64_t> store_slots_;  // slots of stores as bits
  size_t num_stores_ = 0;
  // State of the present decision.
  std::vector<int32_t> found_;  // stores that have blocks of the prompt
  int num_media_ = 1;           // without stores, memory is the only medium
  const Request* request_ = nullptr;
  int64_t need_blocks_ = 0;
  double wait_bound_s_ = 0;
  Match match_;
  double added_[kMaxKinds] = {};  // by kind: seconds that the request adds to the TPOT
  bool spares_ = true;            // leave out mixed workers that would be delayed too long
  bool lends_ = false;            // no decode worker can take the request
  int64_t num_spared_ = 0;        // number of workers left out by `spares_`

  size_t num_chunks() const { return least_ready_at_.size(); }

  static void set_bit(std::vector<uint64_t>& bits, Slot slot, bool value) {
    if (slot / 64 >= bits.size()) bits.resize(slot / 64 + 1);
    const uint64_t bit = 1ull << (slot % 64);
    bits[slot / 64] = value ? bits[slot / 64] | bit : bits[slot / 64] & ~bit;
  }

  int32_t shelves_at(Slot slot) const {
    return slot < shelves_at_.size() ? shelves_at_[slot] : kNone;
  }

  void assign(Slot slot, int32_t number) {
    if (slot >= shelves_at_.size()) shelves_at_.resize(slot + 1, kNone);
    shelves_at_[slot] = number;
    set_bit(store_slots_, slot, number != kNone);
  }

  void grow() {
    const size_t size = workers_.size() + kChunk;
    workers_.resize(size);
    ready_at_.resize(size, kInf);
    behind_.resize(size);
    tpot_.resize(size, kInf);
    room_.resize(size);
    kind_of_.resize(size);
    local_ready_at_.resize(size, kInf);
    least_local_ready_at_.push_back(kInf);
    least_ready_at_.push_back(kInf);
    least_tpot_.push_back(kInf);
    kind_in_.push_back(kNone);
    mixed_.resize(size / kChunk);
    lenders_.resize(size / kChunk);
  }

  void note_kinds(size_t chunk) {
    int32_t found = kNone;
    for (size_t slot = chunk * kChunk; slot < (chunk + 1) * kChunk; ++slot) {
      const int32_t kind = workers_[slot].kind;
      if (kind == kNone) continue;
      if (found != kNone && found != kind) return void(kind_in_[chunk] = kNone);
      found = kind;
    }
    kind_in_[chunk] = found;
  }

  // Gets the added seconds of each worker in a chunk from its kind.
  void load_added(size_t chunk, double* added) const {
    const int32_t kind = kind_in_[chunk];
    if (kind != kNone) return void(std::fill_n(added, kChunk, added_[kind]));
    for (int i = 0; i < kChunk; ++i) added[i] = added_[kind_of_[chunk * kChunk + i]];
  }

  // ------------------------------------------------------------------ load

  const Kind& kind_at(Slot slot) const { return kinds_[workers_[slot].kind]; }

  double ready_at(Slot slot) const {
    const Worker& worker = workers_[slot];
    return worker.kind != kNone && kind_at(slot).prefills ? worker.load.ready_at_s : kInf;
  }

  double local_ready_at(Slot slot) const {
    const Worker& worker = workers_[slot];
    return worker.kind != kNone && kind_at(slot).is_local() ? worker.load.ready_at_s : kInf;
  }

  double tpot_now(Slot slot) const {
    const Worker& worker = workers_[slot];
    if (worker.kind == kNone) return kInf;
    const Kind& kind = kinds_[worker.kind];
    if (!kind.decodes || worker.load.running >= kind.max_running) return kInf;
    return pace_s(slot);
  }

  // The slowdown. Without a TPOT bound, the number of sequences that wait for the prompt is added.
  double weight(Slot slot) const {
    const bool delays = kind_at(slot).is_fluid && request_->tpot_bound_s == kInf;
    return slowdown(slot) + (delays ? static_cast<double>(workers_[slot].load.decoding) : 0);
  }

  // Seconds of a step of all sequences that decode or will decode there.
  double pace_s(Slot slot) const {
    const Load& load = workers_[slot].load;
    return step_s(slot, load.running, load.tokens);
  }

  // Seconds of a step of the sequences that decode there now.
  double present_step_s(Slot slot) const {
    const Load& load = workers_[slot].load;
    return load.decoding == 0 ? 0 : step_s(slot, load.decoding, load.decoding_tokens);
  }

  double step_s(Slot slot, int64_t sequences, int64_t tokens) const {
    const Costs& costs = costs_[kind_at(slot).costs];
    return costs.decode + costs.decode_per_seq * static_cast<double>(sequences) +
           costs.decode_per_token * static_cast<double>(tokens);
  }

  // The factor by which decoding on the worker lengthens a prompt.
  double slowdown(Slot slot) const {
    const Kind& kind = kind_at(slot);
    const double pace = present_step_s(slot);
    if (!kind.is_fluid || pace <= 0) return 1;
    return slowdown_at(pace, kind.stretch);
  }

  double slowdown_at(double step, double stretch) const {
    const double bound = request_->tpot_bound_s;
    const double limit = bound < kInf ? bound : stretch * step;
    return limit > step ? limit / (limit - step) : kInf;
  }

  void refresh(Slot slot) {
    refresh_prefill(slot);
    refresh_decode(slot);
  }

  void refresh_prefill(Slot slot) {
    ready_at_[slot] = ready_at(slot);
    local_ready_at_[slot] = local_ready_at(slot);
    behind_[slot] = workers_[slot].load.behind_s;
    least_ready_at_[slot / kChunk] = least(&ready_at_[slot / kChunk * kChunk]);
    least_local_ready_at_[slot / kChunk] = least(&local_ready_at_[slot / kChunk * kChunk]);
  }

  void refresh_decode(Slot slot) {
    const Worker& worker = workers_[slot];
    room_[slot] = worker.kind == kNone ? 0 : kind_at(slot).num_blocks - worker.load.blocks;
    tpot_[slot] = tpot_now(slot);
    least_tpot_[slot / kChunk] = least(&tpot_[slot / kChunk * kChunk]);
    const bool is_prefill = worker.kind != kNone && !kind_at(slot).decodes;
    set_bit(lenders_, slot, is_prefill && worker.load.decoding > 0);
  }

  static double least(const double* values) {
    double lanes[8];
    for (int i = 0; i < 8; ++i) lanes[i] = values[i];
    for (int i = 8; i < kChunk; i += 8) {
      for (int j = 0; j < 8; ++j) lanes[j] = values[i + j] < lanes[j] ? values[i + j] : lanes[j];
    }
    for (int i = 1; i < 8; ++i) lanes[0] = std::min(lanes[0], lanes[i]);
    return lanes[0];
  }

  int64_t blocks_for(int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

  // Reserves the resources of a decision, until Python reports the workers' new loads.
  void reserve(const Decision& decision, double work_s) {
    Load& prefill = workers_[decision.prefill].load;
    const bool is_idle = prefill.ready_at_s <= request_->now_s && prefill.behind_s == 0;
    prefill.ready_at_s = std::max(prefill.ready_at_s, request_->now_s) + work_s;
    if (!is_idle) prefill.behind_s += work_s;
    Load& decode = workers_[decision.decode].load;
    decode.running += 1;
    decode.tokens += (request_->num_tokens + need_blocks_ * block_size_) / 2;
    decode.blocks += need_blocks_;
    refresh_prefill(decision.prefill);
    refresh_decode(decision.decode);
  }

  // ------------------------------------------------------------------ decode

  Choice choose_decode() {
    double least_added = kInf;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const Costs& costs = costs_[kinds_[kind].costs];
      added_[kind] = added_s(costs);
      least_added = std::min(least_added, added_[kind]);
    }
    Choice choice;
    const auto cost_of = [&](double tpot) { return tpot + least_added; };
    each_chunk(least_tpot_, -kInf, choice, cost_of, [&](size_t chunk) {
      double values[kChunk], added[kChunk];
      const size_t base = chunk * kChunk;
      load_added(chunk, added);
      for (int i = 0; i < kChunk; ++i) {
        const double value = tpot_[base + i] + added[i];
        values[i] = room_[base + i] >= need_blocks_ ? value : kInf;
      }
      offer_least(values, base, 0, choice);
    });
    return choice;
  }

  // Context tokens that the request adds, in the middle of its growth.
  int64_t context_tokens() const { return (request_->num_tokens + request_->final_tokens) / 2; }

  // Seconds by which the request lengthens a step.
  double added_s(const Costs& costs) const {
    return costs.decode_per_seq + costs.decode_per_token * static_cast<double>(context_tokens());
  }

  double tpot_s(Slot slot) const { return tpot_[slot] + added_s(costs_[kind_at(slot).costs]); }

  // Seconds per token if this prefill worker decoded the request.
  double lent_tpot_s(Slot slot) const {
    return pace_s(slot) + added_s(costs_[kind_at(slot).costs]);
  }

  // The seconds per token after joining, plus the slowdown of the other sequences. With a TPOT
  // bound, this slowdown is not added.
  double token_price_s(Slot slot, double tpot) const {
    if (request_->tpot_bound_s < kInf) return tpot;
    const auto running = static_cast<double>(workers_[slot].load.running);
    return tpot + running * added_s(costs_[kind_at(slot).costs]);
  }

  // True if decoding at the worker that computes the prompt gains more than the prompts there lose.
  bool gains_if_lent(Slot slot, const Choice& decode) const {
    if (!may_be_lent(slot)) return false;
    const double tpot = lent_tpot_s(slot);
    const double slowdown = slowdown_at(tpot, kind_at(slot).stretch);
    const double there = token_price_s(decode.slot, decode.cost);
    const double here = token_price_s(slot, tpot) * lend_ratio(slowdown);
    const double slowed_more = (slowdown - 1) * (request_->queued + 1) / 2;
    const double loss = request_->queued_s * (1 + slowed_more) + wait_s(slot);
    return (there - here) * tokens_to_come() > loss;
  }

  // The factor on a step's price at a prefill worker, given the expected prompts. Without a TPOT
  // bound, prompts take `slowdown` times as long, and the prompts behind them wait.
  double lend_ratio(double slowdown) const {
    const double busy = request_->busy, idle = 1 - busy;
    if (idle <= 0) return kInf;
    const double slowed = request_->tpot_bound_s < kInf ? 0 : busy * (slowdown - 1) / (idle * idle);
    return rule_.lend_ratio / idle * (1 + rule_.prompt_weight * slowed);
  }

  // True if the worker is a prefill worker with room to decode the request within the TPOT bound.
  bool may_be_lent(Slot slot) const {
    const Kind& kind = kind_at(slot);
    const Load& load = workers_[slot].load;
    if (!kind.is_fluid || kind.decodes || load.running >= kind.max_running) return false;
    if (load.blocks + need_blocks_ > rule_.lend_share * kind.num_blocks) return false;
    if (blocks_for(request_->max_tokens) > kind.num_blocks) return false;
    const double tpot = lent_tpot_s(slot);
    return tpot > 0 && is_kept(tpot);
  }

  // Seconds that prompts lose if the worker decodes the request; infinite if it may not decode.
  double delay_s(Slot slot) const {
    if (!may_be_lent(slot)) return kInf;
    const Costs& costs = costs_[kind_at(slot).costs];
    const double begun = workers_[slot].load.running > 0 ? 0 : costs.decode;
    return (begun + added_s(costs)) * (request_->busy * tokens_to_come());
  }

  // Breaks ties among prefill workers that may decode: the fullest wins while prompts come,
  // otherwise the quickest.
  double preference(Slot slot) const {
    return request_->busy > 0 ? lent_tpot_s(slot) : -lent_tpot_s(slot);
  }

  // Chooses the prefill worker whose prompts lose least if it decodes the request.
  Choice choose_lender() {
    Choice choice;
    for (Slot slot = 0; slot < workers_.size(); ++slot) {
      const double delay = ready_at_[slot] < kInf ? delay_s(slot) : kInf;
      if (delay == choice.cost && delay < kInf && preference(slot) != preference(choice.slot)) {
        if (preference(slot) < preference(choice.slot)) continue;
        choice = {};
      }
      choice.offer(delay, slot, 0, random_);
    }
    return choice;
  }

  double tokens_to_come() const {
    const int64_t tokens = request_->final_tokens - request_->num_tokens;
    return static_cast<double>(std::max<int64_t>(tokens, 1));
  }

  // True if the prompt should wait for another worker, because decoding on this one slows it down.
  // The time that it would take here counts as a gain for the prompts behind it in the queue.
  bool should_wait(Decision& decision, const Choice& prefill) {
    const Kind& kind = kind_at(prefill.slot);
    if (kind.decodes || slowdown(prefill.slot) <= 1) return false;
    const double work = work_s(kind, prefill.depth);
    const double price = wait_s(prefill.slot) + work * weight(prefill.slot);
    wait_bound_s_ = kInf;
    const Choice other = choose_prefill(false);
    wait_bound_s_ = request_->wait_bound_s;
    if (other.cost >= price - request_->queued * work) return false;
    if (wait_s(other.slot) <= wait_bound_s_) return false;
    decision.status = kNoPrefill;
    decision.wait_s = wait_s(other.slot);
    return true;
  }

  // Sets the reason of a refusal: no decode worker has room, or none keeps the TPOT bound.
  void refuse(Decision& decision, const Choice& decode) const {
    decision.status = decode.cost == kInf ? kNoRoom : kTooSlow;
    if (decode.cost < kInf) decision.wait_s = has_open_local() ? 0 : soonest_s();
  }

  // True if the TPOT bound is kept, or if the answer has no token after the first one.
  bool is_kept(double tpot) const {
    return tpot <= request_->tpot_bound_s || request_->max_tokens <= request_->num_tokens + 1;
  }

  bool has_room(Slot slot) const { return room_[slot] >= need_blocks_ && tpot_[slot] < kInf; }

  bool can_decode(Slot slot) const { return has_room(slot) && is_kept(tpot_s(slot)); }

  // ------------------------------------------------------------------ prefill

  double wait_s(Slot slot) const {
    const Load& load = workers_[slot].load;
    return std::max(load.ready_at_s - request_->now_s, load.behind_s);
  }

  // True if a worker has memory for the prompt, or for the whole answer if it also decodes.
  bool could_prefill(const Kind& kind) const {
    const int64_t tokens = kind.decodes ? request_->max_tokens : request_->num_tokens;
    return blocks_for(tokens) <= kind.num_blocks;
  }

  // True if the sequences that decode there would wait too long for prompts of `work_s` seconds.
  bool is_in_the_way(Slot slot, double work_s) const {
    return workers_[slot].load.running > 0 && tpot_[slot] + work_s > request_->tpot_bound_s;
  }

  // Seconds from the worker's readiness to the first token, with `depth` blocks cached. `medium` is
  // set to the medium from which further blocks are pulled; kNone: no pull.
  double work_s(const Kind& kind, uint32_t depth, int32_t* medium) const {
    const Costs& costs = costs_[kind.costs];
    const auto n = static_cast<double>(request_->num_tokens);
    double least_s = costs.prefill_s(n, static_cast<double>(depth * block_size_));
    *medium = kNone;
    if (!kind.pulls) return least_s;
    const Best* bests = groups_[kind.group].best;
    for (int i = 0; i < num_media_; ++i) {
      const Best& best = bests[i];
      if (best.depth <= depth) continue;
      const double pull_s =
          costs.pull + costs.pull_per_block * (best.depth - depth) + best.answers_s;
      const double pulled_s = std::max(pull_s, best.load_s) +
                              costs.prefill_s(n, static_cast<double>(best.depth * block_size_));
      if (pulled_s < least_s) least_s = pulled_s, *medium = i;
    }
    return least_s;
  }

  double work_s(const Kind& kind, uint32_t depth) const {
    int32_t medium;
    return work_s(kind, depth, &medium);
  }

  // Offers workers by the number of their cached blocks: one by one, or all of equal depth at once.
  template <class One, class All>
  void offer_by_depth(One one, All all) {
    const std::vector<uint64_t>* rest = nullptr;
    for (const Held& held : match_.few) one(held);
    for (size_t i = match_.num_many; i-- > 0;) all(&match_.many[i].bits, match_.many[i].depth);
    if (!match_.few.empty() || match_.num_many > 0) find_rest(), rest = &rest_;
    all(rest, 0);
  }

  // With `spares`, leaves out mixed workers whose sequences the prompt would delay too long.
  Choice choose_prefill(bool spares = true) {
    spares_ = spares;
    num_spared_ = 0;
    Choice choice;
    offer_by_depth([&](const Held& held) { offer_one(held, choice); },
                   [&](auto* bits, uint32_t depth) { offer_all(bits, depth, choice); });
    return choice;
  }

  // Chooses a fluid decode worker that prefills the prompt itself, at a cost below `limit`.
  Choice choose_local(double limit) {
    Choice choice;
    choice.cost = limit;
    offer_by_depth([&](const Held& held) { offer_local(held, choice); },
                   [&](auto* bits, uint32_t depth) { offer_locals(bits, depth, choice); });
    if (choice.ties == 0) choice.cost = kInf;
    return choice;
  }

  // Like `offer_all`, for fluid decode workers. The bound of a chunk ignores their decoding, which
  // only makes a worker worse.
  void offer_locals(const std::vector<uint64_t>* bits, uint32_t depth, Choice& choice) {
    double least_added = kInf;
    for (const Kind& kind : kinds_) {
      if (kind.is_local() && could_prefill(kind)) {
        least_added = std::min(least_added, work_s(kind, depth));
      }
    }
    if (least_added == kInf) return;
    const auto cost_of = [&](double ready_at) {
      const double wait = std::max(0.0, ready_at - request_->now_s);
      return wait <= wait_bound_s_ ? wait + least_added : kInf;
    };
    each_chunk(least_local_ready_at_, request_->now_s, choice, cost_of, [&](size_t chunk) {
      uint64_t rest = bits == nullptr ? ~0ull : chunk < bits->size() ? (*bits)[chunk] : 0;
      rest &= chunk < locals_.size() ? locals_[chunk] : 0;
      for (; rest; rest &= rest - 1) {
        offer_local({static_cast<Slot>(chunk * kChunk + std::countr_zero(rest)), depth}, choice);
      }
    });
  }

  void offer_local(const Held& held, Choice& choice) {
    if (!bit_at(locals_.data(), locals_.size(), held.slot)) return;
    const Kind& kind = kind_at(held.slot);
    const double wait = wait_s(held.slot);
    if (!could_prefill(kind) || wait > wait_bound_s_ || !can_decode(held.slot)) return;
    const double cost = wait + work_s(kind, held.depth) * weight(held.slot);
    if (choice.ties == 0 && cost >= choice.cost) return;  // no better than `limit`
    choice.offer(cost, held.slot, held.depth, random_);
  }

  // True if local prefill is quicker than waiting, for this request and those behind it together.
  bool is_quicker(const Choice& local, double without) const {
    const double work = work_s(kind_at(local.slot), local.depth);
    return local.cost - request_->queued * work < without;
  }

  // The cost of waiting for a prefill worker while all are busy; infinite if one has time now.
  double without(int64_t num_spared) {
    if (num_spared > 0 || has_open_prefill()) return kInf;
    wait_bound_s_ = kInf;
    const double cost = choose_prefill(false).cost;
    wait_bound_s_ = request_->wait_bound_s;
    return cost;
  }

  // True if a prefill worker has time for the request; a mixed worker must also have room.
  bool has_open_prefill() const {
    for (Slot slot = 0; slot < workers_.size(); ++slot) {
      if (ready_at_[slot] == kInf || wait_s(slot) > wait_bound_s_) continue;
      const Kind& kind = kind_at(slot);
      if (could_prefill(kind) && (!kind.decodes || has_room(slot))) return true;
    }
    return false;
  }

  // True if the slot belongs to a worker of this fleet. The index may have other slots.
  bool is_known(Slot slot) const { return slot < workers_.size() && workers_[slot].kind != kNone; }

  void find_best() {
    num_media_ = num_stores_ == 0 ? 1 : kMedia;
    for (Group& group : groups_) std::fill_n(group.best, num_media_, Best());
    for (const Held& held : match_.few) {
      if (is_known(held.slot)) {
        uint32_t& depth = groups_[kind_at(held.slot).group].best[0].depth;
        depth = std::max(depth, held.depth);
      }
    }
    for (Group& group : groups_) {
      Best& best = group.best[0];
      for (size_t i = 0; i < match_.num_many; ++i) {
        const Layer& layer = match_.many[i];
        if (layer.depth > best.depth && have_common(layer.bits, group.members)) {
          best.depth = layer.depth;
        }
      }
      best.answers_s = best.depth ? soonest_answer_s(group) : 0;
    }
    if (num_stores_ > 0) find_stores();
    if (!request_->may_pull) num_media_ = 0;
  }

  // Finds the blocks that stores have, and updates the best holders of each group. A store answers
  // an offer at once.
  void find_stores() {
    for (const int32_t number : found_) std::fill_n(shelves_[number].depth, kMedia, 0u);
    found_.clear();
    for (const Held& held : match_.few) note_held(held);
    for (size_t i = 0; i < match_.num_many; ++i) {
      const Layer& layer = match_.many[i];
      for (size_t j = 0; j < std::min(layer.bits.size(), store_slots_.size()); ++j) {
        for (uint64_t rest = layer.bits[j] & store_slots_[j]; rest; rest &= rest - 1) {
          note_held({static_cast<Slot>(64 * j + std::countr_zero(rest)), layer.depth});
        }
      }
    }
    for (const int32_t number : found_) {
      Shelves& shelves = shelves_[number];
      price_loads(shelves);
      for (int medium = 0; medium < kMedia; ++medium) {
        const uint32_t depth = shelves.depth[medium];
        const double load_s = shelves.load_s[medium];
        Best& best = groups_[shelves.store.group].best[medium];
        if (depth < best.depth || depth == 0) continue;
        const bool is_later = best.answers_s == 0 && load_s >= best.load_s;
        if (depth == best.depth && is_later) continue;
        best = {depth, 0, load_s};
      }
    }
  }

  void note_held(const Held& held) {
    const int32_t number = shelves_at(held.slot);
    if (number == kNone) return;
    Shelves& shelves = shelves_[number];
    const auto slot = static_cast<int32_t>(held.slot);
    bool is_new = true;
    for (const uint32_t depth : shelves.depth) is_new &= depth == 0;
    if (is_new) found_.push_back(number);
    for (int medium = 0; medium < kMedia; ++medium) {
      if (shelves.store.slots[medium] == slot) shelves.depth[medium] = held.depth;
    }
  }

  // A store reads its lower media in parallel, and from each the blocks that faster media lack.
  static void price_loads(Shelves& shelves) {
    uint32_t above = shelves.depth[0];
    double load_s = shelves.load_s[0] = 0;
    for (int medium = 1; medium < kMedia; ++medium) {
      if (shelves.depth[medium] <= above) {
        shelves.depth[medium] = 0;
        continue;
      }
      const double own_s = shelves.store.load[medium] +
                           shelves.store.load_per_block[medium] * (shelves.depth[medium] - above);
      shelves.load_s[medium] = load_s = std::max(load_s, own_s);
      above = shelves.depth[medium];
    }
  }

  double answers_s(Slot slot) const { return std::min(wait_s(slot), request_->offer_s); }

  double soonest_answer_s(const Group& group) const {
    double soonest = kInf;
    each_holder(group, [&](Slot slot) {
      soonest = std::min(soonest, answers_s(slot));
      return soonest > 0;
    });
    return soonest;
  }

  // Visits those workers of the group that have most blocks in memory, until `visit` returns false.
  template <class Visit>
  void each_holder(const Group& group, Visit visit) const {
    const uint32_t depth = group.best[0].depth;
    for (const Held& held : match_.few) {
      if (held.depth != depth || !is_known(held.slot)) continue;
      if (&groups_[kind_at(held.slot).group] == &group && !visit(held.slot)) return;
    }
    for (size_t i = 0; i < match_.num_many; ++i) {
      const Layer& layer = match_.many[i];
      if (layer.depth != depth) continue;
      for (size_t j = 0; j < std::min(layer.bits.size(), group.members.size()); ++j) {
        for (uint64_t rest = layer.bits[j] & group.members[j]; rest; rest &= rest - 1) {
          if (!visit(static_cast<Slot>(64 * j + std::countr_zero(rest)))) return;
        }
      }
    }
  }

  void find_rest() {
    rest_.assign(num_chunks(), ~0ull);
    for (const Held& held : match_.few) {
      if (held.slot < workers_.size()) rest_[held.slot / 64] &= ~(1ull << (held.slot % 64));
    }
    for (size_t i = 0; i < match_.num_many; ++i) {
      const std::vector<uint64_t>& bits = match_.many[i].bits;
      for (size_t j = 0; j < std::min(bits.size(), rest_.size()); ++j) rest_[j] &= ~bits[j];
    }
  }

  void offer_one(const Held& held, Choice& choice) {
    const Slot slot = held.slot;
    if (slot >= workers_.size() || ready_at_[slot] == kInf) return;
    const double wait = wait_s(slot);
    const Kind& kind = kind_at(slot);
    if (wait > wait_bound_s_ || !could_prefill(kind)) return;
    const double work = work_s(kind, held.depth);
    if (kind.decodes && is_unable(slot, work)) return;
    if (weight(slot) == kInf) return;
    const double delay = lends_ ? delay_s(slot) : 0;
    choice.offer(wait + work * weight(slot) + delay, slot, held.depth, random_);
  }

  // True if a mixed worker cannot decode the request, or would be delayed too long.
  bool is_unable(Slot slot, double work) {
    if (!can_decode(slot)) return true;
    if (!spares_ || !is_in_the_way(slot, work)) return false;
    ++num_spared_;
    return true;
  }

  // Offers the workers with these bits, or all workers. Each of them has `depth` blocks cached.
  void offer_all(const std::vector<uint64_t>* bits, uint32_t depth, Choice& choice) {
    double least_added = kInf;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const bool is_able = could_prefill(kinds_[kind]);
      added_[kind] = is_able ? work_s(kinds_[kind], depth) : kInf;
      least_added = std::min(least_added, added_[kind]);
    }
    const double now_s = request_->now_s, wait_bound_s = wait_bound_s_;
    const auto cost_of = [&](double ready_at) {
      const double wait = std::max(0.0, ready_at - now_s);
      return wait <= wait_bound_s ? wait + least_added : kInf;
    };
    each_chunk(least_ready_at_, now_s, choice, cost_of, [&](size_t chunk) {
      uint64_t mask = bits == nullptr ? ~0ull : chunk < bits->size() ? (*bits)[chunk] : 0;
      mask &= ~unable(chunk);
      if (mask == 0) return;
      double values[kChunk], added[kChunk];
      const size_t base = chunk * kChunk;
      load_added(chunk, added);
      for (int i = 0; i < kChunk; ++i) {
        const double ready = ready_at_[base + i] - now_s, behind = behind_[base + i];
        const double wait = ready > behind ? ready : behind;
        const double value = wait + added[i];
        values[i] = (mask >> i & 1) && wait <= wait_bound_s ? value : kInf;
      }
      for (uint64_t rest = lenders_[chunk] & mask; rest; rest &= rest - 1) {
        const int i = std::countr_zero(rest);
        const double factor = weight(static_cast<Slot>(base + i));
        values[i] = factor < kInf ? values[i] + added[i] * (factor - 1) : kInf;
      }
      if (lends_) {
        for (int i = 0; i < kChunk; ++i) {
          if (values[i] < kInf) values[i] += delay_s(static_cast<Slot>(base + i));
        }
      }
      offer_least(values, base, depth, choice);
    });
  }

  // Returns the mixed workers of a chunk that must not be chosen, as bits.
  uint64_t unable(size_t chunk) {
    uint64_t found = 0;
    for (uint64_t rest = mixed_[chunk]; rest; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      const auto slot = static_cast<Slot>(chunk * kChunk + i);
      if (is_unable(slot, added_[kind_of_[slot]])) found |= 1ull << i;
    }
    return found;
  }

  // True if a fluid decode worker has room.
  bool has_open_local() const {
    for (size_t i = 0; i < locals_.size(); ++i) {
      for (uint64_t rest = locals_[i]; rest; rest &= rest - 1) {
        if (has_room(static_cast<Slot>(64 * i + std::countr_zero(rest)))) return true;
      }
    }
    return false;
  }

  // Seconds until any worker's backlog is within the bound; infinite if there is no such worker.
  double soonest_s() const {
    double soonest = kInf;
    for (Slot slot = 0; slot < workers_.size(); ++slot) {
      if (ready_at_[slot] == kInf || !could_prefill(kind_at(slot))) continue;
      if (kind_at(slot).decodes && !has_room(slot)) continue;
      if (workers_[slot].load.behind_s > wait_bound_s_) continue;  // waiting does not help
      soonest = std::min(soonest, wait_s(slot));
    }
    return soonest;
  }

  // ------------------------------------------------------------------ both

  // Visits chunks by their lower bounds, lowest first, until no other chunk can contain a cheaper
  // worker. Among equal bounds, the search starts at a random chunk, so that ties are spread. A
  // bound below `floor` counts as `floor`.
  template <class CostOf, class Visit>
  void each_chunk(const std::vector<double>& bounds, double floor, const Choice& choice,
                  CostOf cost_of, Visit visit) {
    const size_t count = num_chunks();
    if (count == 0) return;
    const size_t from = random_.below(count);
    size_t first = from;
    double least = kInf;
    const auto look = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end && least > floor; ++i) {
        if (bounds[i] < least) first = i, least = bounds[i];
      }
    };
    look(from, count);
    look(0, from);
    const double least_cost = cost_of(least);
    for (size_t i = 0; i < count && choice.cost > least_cost; ++i) {
      const size_t chunk = first + i < count ? first + i : first + i - count;
      const double cost = cost_of(bounds[chunk]);
      if (cost <= choice.cost && cost < kInf) visit(chunk);
    }
  }

  void offer_least(const double* values, size_t base, uint32_t depth, Choice& choice) {
    const double cost = least(values);
    if (cost > choice.cost || cost == kInf) return;
    uint64_t ties = 0;
    for (int i = 0; i < kChunk; ++i) ties += values[i] == cost;
    if (cost < choice.cost) choice.ties = 0;
    choice.cost = cost;
    choice.ties += ties;
    if (random_.below(choice.ties) >= ties) return;
    uint64_t skip = random_.below(ties);
    int i = 0;
    while (values[i] != cost || skip-- > 0) ++i;
    choice.slot = static_cast<Slot>(base + i);
    choice.depth = depth;
  }

  static bool have_common(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      if (a[i] & b[i]) return true;
    }
    return false;
  }

  // Fills in the decision. Returns the seconds of the prefill.
  double fill(Decision& decision, const Choice& prefill, const Choice& decode) {
    const Kind& kind = kind_at(prefill.slot);
    int32_t medium;
    const double work = work_s(kind, prefill.depth, &medium);
    decision.prefill = static_cast<int32_t>(prefill.slot);
    decision.decode = static_cast<int32_t>(decode.slot);
    decision.matched_blocks = static_cast<int32_t>(prefill.depth);
    decision.wait_s = wait_s(prefill.slot);
    decision.slowdown = slowdown(prefill.slot);
    decision.ttft_s = decision.wait_s + work * decision.slowdown;
    decision.tpot_s = decode.cost;
    if (medium == kNone) return work * decision.slowdown;
    const Best& best = groups_[kind.group].best[medium];
    decision.pulled_blocks = static_cast<int32_t>(best.depth - prefill.depth);
    decision.medium = medium;
    decision.load_s = best.load_s;
    decision.source = source(kind.group, medium);
    return work * decision.slowdown;
  }

  // Chooses a source at random among the workers and stores that have most blocks and can answer
  // first.
  int32_t source(int32_t number, int32_t medium) {
    const Group& group = groups_[number];
    const Best& best = group.best[medium];
    uint64_t ties = 0;
    int32_t found = kNone;
    const auto offer = [&](int32_t slot) {
      if (random_.below(++ties) == 0) found = slot;
    };
    if (medium == 0) {
      each_holder(group, [&](Slot slot) {
        if (answers_s(slot) <= best.answers_s) offer(static_cast<int32_t>(slot));
        return true;
      });
    }
    if (num_stores_ == 0) return found;
    for (const int32_t i : found_) {
      const Shelves& shelves = shelves_[i];
      if (shelves.store.group != number || shelves.depth[medium] != best.depth) continue;
      if (shelves.load_s[medium] <= best.load_s) offer(shelves.store.slots[0]);
    }
    return found;
  }
};

}  // namespace baton
