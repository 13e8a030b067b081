// Each worker's load, and where the next request goes: one call that decides and reserves.
//
// A prefill worker is taken for the least predicted time to the first token,
//
//     ready(w) + min(prefill(n, own), pull(best - own) + prefill(n, best))
//
// a decode worker for the least predicted time per token after the request has joined. Arrays are by
// slot and in chunks of 64, each with a lower bound of its minimum: a chunk that cannot hold the
// answer is not looked into.
#pragma once

#include <cmath>
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

// Of one class of workers; seconds. n tokens of which p are cached, k blocks, b sequences.
struct Costs {
  double prefill, prefill_per_token, prefill_per_square;  // A + B(n-p) + C(n²-p²)
  double decode, decode_per_seq, decode_per_token;        // D + E·b + F·kv
  double pull, pull_per_block;                            // t0 + k·t_block

  double prefill_s(double n, double p) const {
    return prefill + prefill_per_token * (n - p) + prefill_per_square * (n * n - p * p);
  }
};

// What workers have in common beside costs. Those of one group, 0 or more, hold the same blocks for
// the same prompt; one that pulls may take them from the others of its group.
struct Kind {
  int32_t costs, group, pulls, unused;
};

struct Request {
  int64_t num_tokens;     // to prefill
  int64_t final_tokens;   // predicted for the end of the answer, prompt included
  double now_s, tpot_bound_s, wait_bound_s;  // infinite where there is no bound
};

enum Status : int32_t { kPlaced, kNoPrefill, kNoRoom, kTooSlow };

struct Decision {
  int32_t status, prefill, decode, source;
  int32_t matched_blocks, pulled_blocks;  // here already, and to come from the source
  int32_t ticket, unused;
  double wait_s, ttft_s, tpot_s;
};

// What a request has reserved. A side is given back, or its worker is gone, when that is kNone.
struct Ticket {
  int32_t prefill = kNone, decode = kNone;
  double work_s = 0;
  int64_t tokens = 0, blocks = 0;
};

// What is held against a worker.
struct Load {
  double work_s = 0;  // prefill that was given to it and not reported done
  int64_t num_prefills = 0, running = 0, tokens = 0, blocks = 0;
};

struct Worker {
  int32_t kind = kNone;  // none: nobody is in this slot
  bool prefills = false, decodes = false, is_open = false;
  int64_t num_blocks = 0, max_running = 0;
  double busy_until_s = 0, others_until_s = 0;
  Load own, others;  // ours, and what other gateways placed as far as was reported
};

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

// The cheapest so far; of several each is kept with the same probability.
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

class Fleet {
 public:
  Fleet(Table& table, int64_t block_size, uint64_t seed)
      : table_(table), block_size_(block_size), random_(seed) {}

  void set_costs(int32_t number, const Costs& costs) {
    if (static_cast<size_t>(number) >= costs_.size()) costs_.resize(number + 1);
    costs_[number] = costs;
    for (Slot slot = 0; slot < workers_.size(); ++slot) {
      const int32_t kind = workers_[slot].kind;
      if (kind != kNone && kinds_[kind].costs == number) refresh_decode(slot);
    }
  }

  int32_t add_kind(const Kind& kind) {
    kinds_.push_back(kind);
    if (kind.group >= static_cast<int32_t>(members_.size())) members_.resize(kind.group + 1);
    return static_cast<int32_t>(kinds_.size() - 1);
  }

  void join(Slot slot, const Worker& worker) {
    while (slot >= workers_.size()) grow();
    workers_[slot] = worker;
    kind_of_[slot] = static_cast<uint8_t>(worker.kind);
    note_kinds(slot / kChunk);
    set_bit(mixed_, slot, worker.prefills && worker.decodes);
    const int32_t group = kinds_[worker.kind].group;
    if (group >= 0) set_bit(members_[group], slot, true);
    refresh(slot);
  }

  void leave(Slot slot) {
    const int32_t group = kinds_[workers_[slot].kind].group;
    if (group >= 0) set_bit(members_[group], slot, false);
    set_bit(mixed_, slot, false);
    workers_[slot] = Worker();
    for (Ticket& ticket : tickets_) {
      if (ticket.prefill == static_cast<int32_t>(slot)) ticket.prefill = kNone;
      if (ticket.decode == static_cast<int32_t>(slot)) ticket.decode = kNone;
    }
    refresh(slot);
  }

  void set_open(Slot slot, bool is_open) {
    workers_[slot].is_open = is_open;
    refresh(slot);
  }

  void set_others(Slot slot, const Load& load, double now_s) {
    Worker& worker = workers_[slot];
    worker.others = load;
    worker.others_until_s = now_s + load.work_s;
    worker.busy_until_s = now_s + worker.own.work_s + load.work_s;
    refresh(slot);
  }

  void decide(const uint8_t* hashes, int64_t count, const Request& request, Decision& decision) {
    decision = {kPlaced, kNone, kNone, kNone, 0, 0, kNone, 0, 0, 0, 0};
    request_ = &request;
    need_blocks_ = (request.final_tokens + block_size_ - 1) / block_size_;
    Choice decode = choose_decode();
    if (decode.cost == kInf) return void(decision.status = kNoRoom);
    if (decode.cost > request.tpot_bound_s) return void(decision.status = kTooSlow);
    // A token at least is computed, or there would be nothing to sample the first one from.
    match_.find(table_, hashes, std::min(count, (request.num_tokens - 1) / block_size_));
    const Choice prefill = choose_prefill();
    if (prefill.cost == kInf) return void(decision.status = kNoPrefill);
    if (workers_[prefill.slot].decodes) {  // what it prefills it goes on with
      decode.slot = prefill.slot;
      decode.cost = tpot_s(prefill.slot);
    }
    decision.ticket = reserve(decision, fill(decision, prefill, decode));
  }

  // The prefill is over, done or not; the rest of its worker's work begins now.
  void prefilled(int32_t number, double now_s) { release_prefill(tickets_[number], now_s); }

  // The request is over; its ticket is used again.
  void release(int32_t number, double now_s) {
    Ticket& ticket = tickets_[number];
    release_prefill(ticket, now_s);
    if (ticket.decode != kNone) {
      Load& own = workers_[ticket.decode].own;
      own.running -= 1;
      own.tokens -= ticket.tokens;
      own.blocks -= ticket.blocks;
      refresh_decode(std::exchange(ticket.decode, kNone));
    }
    free_.push_back(number);
  }

  const Worker& worker(Slot slot) const { return workers_[slot]; }

  bool is_sound() const {
    std::vector<Load> loads(workers_.size());
    for (const Ticket& ticket : tickets_) {
      if (ticket.prefill != kNone) add_prefill(loads[ticket.prefill], ticket);
      if (ticket.decode != kNone) add_decode(loads[ticket.decode], ticket);
    }
    for (int32_t number : free_) {
      if (tickets_[number].prefill != kNone || tickets_[number].decode != kNone) return false;
    }
    for (Slot slot = 0; slot < workers_.size(); ++slot) {
      const Load &own = workers_[slot].own, &sum = loads[slot];
      const double off_s = std::abs(own.work_s - sum.work_s);
      if (own.num_prefills != sum.num_prefills || own.running != sum.running) return false;
      if (own.tokens != sum.tokens || own.blocks != sum.blocks) return false;
      if (off_s > 1e-9 * (1 + sum.work_s)) return false;
      if (ready_at_[slot] != ready_at(slot) || tpot_[slot] != tpot_now(slot)) return false;
      if (ready_at_[slot] < least_ready_at_[slot / kChunk]) return false;
      if (tpot_[slot] < least_tpot_[slot / kChunk]) return false;
    }
    return true;
  }

 private:
  Table& table_;
  int64_t block_size_;
  Random random_;
  std::vector<Costs> costs_;
  std::vector<Kind> kinds_;
  std::vector<Worker> workers_;
  std::vector<Ticket> tickets_;
  std::vector<int32_t> free_;
  // By slot, in whole chunks.
  std::vector<double> ready_at_;  // when it is ready for more prefill; infinite: it takes none
  std::vector<double> tpot_;      // of the present batch; infinite: it takes no sequence
  std::vector<int64_t> room_;     // blocks
  std::vector<uint8_t> kind_of_;
  // By chunk.
  std::vector<double> least_ready_at_, least_tpot_;
  std::vector<int32_t> kind_in_;  // of all workers of the chunk; none: they differ
  std::vector<uint64_t> mixed_, rest_;
  std::vector<std::vector<uint64_t>> members_;  // by group
  // Of the present decision.
  const Request* request_ = nullptr;
  int64_t need_blocks_ = 0;
  Match match_;
  std::vector<uint32_t> best_;   // by group, the most blocks that any member holds
  double added_[kMaxKinds] = {};  // by kind, what joins a worker's own figure

  size_t num_chunks() const { return least_ready_at_.size(); }

  static void set_bit(std::vector<uint64_t>& bits, Slot slot, bool value) {
    if (slot / 64 >= bits.size()) bits.resize(slot / 64 + 1);
    const uint64_t bit = 1ull << (slot % 64);
    bits[slot / 64] = value ? bits[slot / 64] | bit : bits[slot / 64] & ~bit;
  }

  void grow() {
    const size_t size = workers_.size() + kChunk;
    workers_.resize(size);
    ready_at_.resize(size, kInf);
    tpot_.resize(size, kInf);
    room_.resize(size);
    kind_of_.resize(size);
    least_ready_at_.push_back(kInf);
    least_tpot_.push_back(kInf);
    kind_in_.push_back(kNone);
    mixed_.resize(size / kChunk);
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

  // What joins the figures of a chunk's workers.
  void load_added(size_t chunk, double* added) const {
    const int32_t kind = kind_in_[chunk];
    if (kind != kNone) return void(std::fill_n(added, kChunk, added_[kind]));
    for (int i = 0; i < kChunk; ++i) added[i] = added_[kind_of_[chunk * kChunk + i]];
  }

  // ------------------------------------------------------------------ load

  double ready_at(Slot slot) const {
    const Worker& worker = workers_[slot];
    return worker.is_open && worker.prefills ? worker.busy_until_s : kInf;
  }

  double tpot_now(Slot slot) const {
    const Worker& worker = workers_[slot];
    const int64_t running = worker.own.running + worker.others.running;
    if (!worker.is_open || !worker.decodes || running >= worker.max_running) return kInf;
    const Costs& costs = costs_[kinds_[worker.kind].costs];
    return costs.decode + costs.decode_per_seq * static_cast<double>(running) +
           costs.decode_per_token * static_cast<double>(worker.own.tokens + worker.others.tokens);
  }

  void refresh(Slot slot) {
    refresh_prefill(slot);
    refresh_decode(slot);
  }

  void refresh_prefill(Slot slot) {
    ready_at_[slot] = ready_at(slot);
    least_ready_at_[slot / kChunk] = least(&ready_at_[slot / kChunk * kChunk]);
  }

  void refresh_decode(Slot slot) {
    const Worker& worker = workers_[slot];
    room_[slot] = worker.num_blocks - worker.own.blocks - worker.others.blocks;
    tpot_[slot] = tpot_now(slot);
    least_tpot_[slot / kChunk] = least(&tpot_[slot / kChunk * kChunk]);
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

  static void add_prefill(Load& load, const Ticket& ticket) {
    load.work_s += ticket.work_s;
    load.num_prefills += 1;
  }

  static void add_decode(Load& load, const Ticket& ticket) {
    load.running += 1;
    load.tokens += ticket.tokens;
    load.blocks += ticket.blocks;
  }

  int32_t reserve(const Decision& decision, double work_s) {
    if (free_.empty()) {
      free_.push_back(static_cast<int32_t>(tickets_.size()));
      tickets_.emplace_back();
    }
    const int32_t number = free_.back();
    free_.pop_back();
    tickets_[number] = {decision.prefill, decision.decode, work_s, request_->final_tokens,
                        need_blocks_};
    Worker& prefill = workers_[decision.prefill];
    prefill.busy_until_s = std::max(prefill.busy_until_s, request_->now_s) + work_s;
    add_prefill(prefill.own, tickets_[number]);
    add_decode(workers_[decision.decode].own, tickets_[number]);
    refresh_prefill(decision.prefill);
    refresh_decode(decision.decode);
    return number;
  }

  void release_prefill(Ticket& ticket, double now_s) {
    if (ticket.prefill == kNone) return;
    Worker& worker = workers_[ticket.prefill];
    worker.own.num_prefills -= 1;
    // Of nothing nothing is left, not what rounding left.
    worker.own.work_s = worker.own.num_prefills ? worker.own.work_s - ticket.work_s : 0;
    const double others_s = std::max(0.0, worker.others_until_s - now_s);
    worker.busy_until_s = now_s + worker.own.work_s + others_s;
    refresh_prefill(std::exchange(ticket.prefill, kNone));
  }

  // ------------------------------------------------------------------ decode

  Choice choose_decode() {
    double least_added = kInf;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const Costs& costs = costs_[kinds_[kind].costs];
      added_[kind] = costs.decode_per_seq +
                     costs.decode_per_token * static_cast<double>(request_->final_tokens);
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

  double tpot_s(Slot slot) const {
    const Costs& costs = costs_[kinds_[workers_[slot].kind].costs];
    return tpot_[slot] + (costs.decode_per_seq +
                          costs.decode_per_token * static_cast<double>(request_->final_tokens));
  }

  bool can_decode(Slot slot) const {
    const double tpot = tpot_s(slot);
    return room_[slot] >= need_blocks_ && tpot < kInf && tpot <= request_->tpot_bound_s;
  }

  // ------------------------------------------------------------------ prefill

  double wait_s(Slot slot) const { return std::max(0.0, ready_at_[slot] - request_->now_s); }

  // The most blocks that a worker of this kind might pull.
  uint32_t best_for(const Kind& kind) const {
    return kind.group >= 0 && kind.pulls ? best_[kind.group] : 0;
  }

  // From ready to the first token, with so many blocks here; whether some more are pulled.
  double work_s(const Kind& kind, uint32_t depth, bool* is_pulled) const {
    const Costs& costs = costs_[kind.costs];
    const auto n = static_cast<double>(request_->num_tokens);
    const double alone_s = costs.prefill_s(n, static_cast<double>(depth * block_size_));
    const uint32_t best = best_for(kind);
    *is_pulled = false;
    if (best <= depth) return alone_s;
    const double pull_s = costs.pull + costs.pull_per_block * (best - depth);
    const double pulled_s = pull_s + costs.prefill_s(n, static_cast<double>(best * block_size_));
    *is_pulled = pulled_s < alone_s;
    return std::min(alone_s, pulled_s);
  }

  Choice choose_prefill() {
    find_best();
    Choice choice;
    for (const Held& held : match_.few) offer_one(held, choice);
    for (size_t i = match_.num_many; i-- > 0;) {
      const Layer& layer = match_.many[i];
      offer_all(&layer.bits, layer.depth, choice);
    }
    if (match_.few.empty() && match_.num_many == 0) {
      offer_all(nullptr, 0, choice);
    } else {
      find_rest();
      offer_all(&rest_, 0, choice);
    }
    return choice;
  }

  void find_best() {
    best_.assign(members_.size(), 0);
    for (const Held& held : match_.few) {
      const int32_t group = group_of(held.slot);
      if (group >= 0) best_[group] = std::max(best_[group], held.depth);
    }
    for (size_t i = 0; i < match_.num_many; ++i) {
      const Layer& layer = match_.many[i];
      for (size_t group = 0; group < members_.size(); ++group) {
        if (count_common(layer.bits, members_[group])) {
          best_[group] = std::max(best_[group], layer.depth);
        }
      }
    }
  }

  // Only of workers that have joined: the index may know others.
  int32_t group_of(Slot slot) const {
    if (slot >= workers_.size() || workers_[slot].kind == kNone) return kNone;
    return kinds_[workers_[slot].kind].group;
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
    if (wait_s(slot) > request_->wait_bound_s) return;
    if (workers_[slot].decodes && !can_decode(slot)) return;
    bool is_pulled;
    const double work = work_s(kinds_[workers_[slot].kind], held.depth, &is_pulled);
    choice.offer(wait_s(slot) + work, slot, held.depth, random_);
  }

  // Workers of these bits, or all, hold so many blocks each.
  void offer_all(const std::vector<uint64_t>* bits, uint32_t depth, Choice& choice) {
    double least_added = kInf;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      bool is_pulled;
      added_[kind] = work_s(kinds_[kind], depth, &is_pulled);
      least_added = std::min(least_added, added_[kind]);
    }
    const double now_s = request_->now_s, wait_bound_s = request_->wait_bound_s;
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
        const double ready = ready_at_[base + i] - now_s;
        const double wait = ready > 0 ? ready : 0;
        const double value = wait + added[i];
        values[i] = (mask >> i & 1) && wait <= wait_bound_s ? value : kInf;
      }
      offer_least(values, base, depth, choice);
    });
  }

  // Mixed workers that could not go on with it.
  uint64_t unable(size_t chunk) const {
    uint64_t found = 0;
    for (uint64_t rest = mixed_[chunk]; rest; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (!can_decode(static_cast<Slot>(chunk * kChunk + i))) found |= 1ull << i;
    }
    return found;
  }

  // ------------------------------------------------------------------ both

  // Visits chunks, each with a lower bound, until no other can hold what costs less: first the one of
  // the least bound; of several the first from a random one on, so that ties do not all go to the
  // same. A bound below the floor is as good as the floor.
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

  static uint64_t count_common(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
    uint64_t count = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += std::popcount(a[i] & b[i]);
    return count;
  }

  // Returns the seconds of prefill.
  double fill(Decision& decision, const Choice& prefill, const Choice& decode) {
    const Kind& kind = kinds_[workers_[prefill.slot].kind];
    bool is_pulled;
    const double work = work_s(kind, prefill.depth, &is_pulled);
    decision.prefill = static_cast<int32_t>(prefill.slot);
    decision.decode = static_cast<int32_t>(decode.slot);
    decision.matched_blocks = static_cast<int32_t>(prefill.depth);
    decision.wait_s = wait_s(prefill.slot);
    decision.ttft_s = decision.wait_s + work;
    decision.tpot_s = decode.cost;
    if (!is_pulled) return work;
    const uint32_t best = best_[kind.group];
    decision.pulled_blocks = static_cast<int32_t>(best - prefill.depth);
    decision.source = source(kind.group, best);
    return work;
  }

  // Any one of the group that holds so much.
  int32_t source(int32_t group, uint32_t depth) {
    uint64_t ties = 0;
    int32_t found = kNone;
    for (const Held& held : match_.few) {
      if (held.depth != depth || group_of(held.slot) != group) continue;
      if (random_.below(++ties) == 0) found = static_cast<int32_t>(held.slot);
    }
    for (size_t i = 0; i < match_.num_many; ++i) {
      const Layer& layer = match_.many[i];
      if (layer.depth != depth) continue;
      const uint64_t more = count_common(layer.bits, members_[group]);
      if (more == 0) continue;
      ties += more;
      if (random_.below(ties) < more) found = nth_common(layer.bits, members_[group], more);
    }
    return found;
  }

  int32_t nth_common(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b,
                     uint64_t count) {
    uint64_t skip = random_.below(count);
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      for (uint64_t rest = a[i] & b[i]; rest; rest &= rest - 1) {
        if (skip-- == 0) return static_cast<int32_t>(64 * i + std::countr_zero(rest));
      }
    }
    return kNone;
  }
};

}  // namespace baton
