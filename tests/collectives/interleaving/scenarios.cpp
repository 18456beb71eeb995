#include "scenarios.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include "arena.h"

#define private public  // cursors are the state of a rank
#include "shared_memory/call.h"
#include "shared_memory/group.h"
#include "shared_memory/layout.h"
#undef private

extern "C" void __tsan_write_range(void* address, size_t bytes);
extern "C" void __tsan_read_range(void* address, size_t bytes);

namespace psengine {
int kYields = 0;
}

namespace check {

using psengine::SharedMemoryGroup;
using psengine::WaitResult;
using psengine::WaitStatus;

constexpr size_t kTensorBytes = 64;

static Scenario scenario;
static SharedMemoryGroup* groups[kMaxThreads];
static char* segments[kMaxThreads];       // memory that others map
static size_t segment_indices[kMaxThreads];
static double* tensors[kMaxThreads];      // memory of the rank's own: input, then output

static double addend(size_t rank, size_t call, size_t i) {
  return static_cast<double>((uint64_t{1} << (4 * rank)) + 4096 * call + 65536 * i);
}

// ---- calls -------------------------------------------------------------------------------------------------------

struct Begun {
  uint64_t operation;
  double* output;
};

static bool is_in_place(Way way) { return way == Way::in_place || way == Way::one_chunk || way == Way::contributions; }

// Of contributions, by number: the rank, and the row of its memory, whose row 0 gets the sum.
static const psengine::Contribution contributions[] = {{0, 1}, {1, 1}, {0, 2}, {2, 1}};

static size_t numel_of(Way way) {
  if (way == Way::in_place || way == Way::staged) return 3;
  return way == Way::one_chunk || way == Way::staged_chunk ? 2 : 1;
}

static Begun begin(size_t rank, size_t call, Way way) {
  SharedMemoryGroup& group = *groups[rank];
  auto kind = psengine::ScalarKind::float64;
  size_t numel = numel_of(way);
  double* own = tensors[rank] + call * 16;
  double* input = is_in_place(way) ? reinterpret_cast<double*>(segments[rank] + psengine::kPageBytes) : own;
  size_t inputs = way == Way::scatter ? scenario.ranks : way == Way::contributions ? 3 : numel;
  bool has_input = way != Way::barrier && (way != Way::broadcast || rank == call % scenario.ranks);
  if (has_input) {
    __tsan_write_range(input, inputs * sizeof(double));
    for (size_t i = 0; i < inputs; ++i) input[i] = addend(rank, call, i);
  }
  auto* bytes = reinterpret_cast<char*>(input);
  double* output = way == Way::gather || way == Way::scatter ? own + 8 : input;
  switch (way) {
    case Way::in_place:
    case Way::one_chunk:
    case Way::staged:
    case Way::staged_chunk:
    case Way::small:
      return {group.all_reduce(bytes, numel, kind, 1.0), output};
    case Way::contributions:
      return {group.sum_contributions(bytes, numel, kind, contributions, scenario.ranks + 1), output};
    case Way::broadcast:
      return {group.broadcast(bytes, sizeof(double), call % scenario.ranks), output};
    case Way::gather:
      return {group.all_gather(bytes, reinterpret_cast<char*>(output), sizeof(double)), output};
    case Way::scatter:
      return {group.reduce_scatter(bytes, reinterpret_cast<char*>(output), 1, kind, 1.0), output};
    default:
      return {group.barrier(), nullptr};
  }
}

static void check_output(size_t rank, size_t call, Way way, const double* output) {
  size_t numel = way == Way::gather ? scenario.ranks : way == Way::barrier ? 0 : numel_of(way);
  for (size_t i = 0; i < numel; ++i) {
    __tsan_read_range(const_cast<double*>(output + i), sizeof(double));
    double expected = 0;
    if (way == Way::gather) expected = addend(i, call, 0);
    else if (way == Way::broadcast) expected = addend(call % scenario.ranks, call, i);
    else if (way == Way::contributions)
      for (size_t number = 0; number <= scenario.ranks; ++number)
        expected += addend(contributions[number].rank, call, contributions[number].row);
    else
      for (size_t other = 0; other < scenario.ranks; ++other)
        expected += addend(other, call, way == Way::scatter ? rank : i);
    if (output[i] != expected)
      explorer().fail("call " + std::to_string(call) + " gave rank " + std::to_string(rank) + " the value " +
                      std::to_string(output[i]) + " (expected " + std::to_string(expected) + ")");
  }
}

static void check_failure(size_t rank, const WaitResult& result) {
  std::string told = "rank " + std::to_string(rank) + " is told of status " +
                     std::to_string(static_cast<int>(result.status)) + " and ranks " + std::to_string(result.ranks);
  InProgram outside(false);
  WaitStatus expected = WaitStatus::done;
  uint64_t ranks = 0;
  if (scenario.victim >= 0 && explorer().is_rank_dead(static_cast<size_t>(scenario.victim))) {
    expected = WaitStatus::lost;
    ranks = uint64_t{1} << scenario.victim;
  } else if (scenario.late >= 0) {
    expected = WaitStatus::timed_out;
    ranks = uint64_t{1} << scenario.late;
  } else if (scenario.differs >= 0) {
    expected = WaitStatus::mismatched;
    ranks = result.ranks;
    if (result.detail.find("rank " + std::to_string(scenario.differs) + " called") == std::string::npos)
      explorer().fail(told + " and '" + result.detail + "'");
  }
  if (result.status != expected || result.ranks != ranks) explorer().fail(told);
}

static bool is_completed(size_t rank, uint64_t operation) {
  SharedMemoryGroup& group = *groups[rank];
  if (group.spin(operation)) return true;
  WaitResult result = group.wait(operation, scenario.late >= 0 ? 0.05 : 1e6, false, [] { return false; });
  if (result.status == WaitStatus::done) return true;
  check_failure(rank, result);
  return false;
}

static void run_calls(size_t thread) {
  bool is_helper = thread == scenario.ranks;
  size_t rank = is_helper ? 0 : thread;
  if (static_cast<int>(rank) == scenario.late) return;
  std::vector<Begun> begun;
  uint64_t place = 0;
  auto finish = [&](size_t call) {
    if (!is_completed(rank, begun[call].operation)) return false;
    check_output(rank, call, scenario.calls[call], begun[call].output);
    InProgram outside(false);
    explorer().forget_history(++place);
    return true;
  };
  if (is_helper) {  // its operation's number is known before it is begun
    is_completed(0, scenario.calls.size());
    return;
  }
  bool is_well = true;
  for (size_t call = 0; call < scenario.calls.size() && is_well; ++call) {
    Way way = static_cast<int>(rank) == scenario.differs ? Way::barrier : scenario.calls[call];
    begun.push_back(begin(rank, call, way));
    if (!scenario.overlaps) is_well = finish(call);
  }
  if (scenario.overlaps)
    for (size_t call = 0; call < scenario.calls.size() && is_well; ++call) is_well = finish(call);
  if (!scenario.leaves) return;
  groups[rank]->release_segment(segment_indices[rank]);
  __tsan_write_range(segments[rank] + psengine::kPageBytes, kTensorBytes);  // it is gone
  groups[rank]->close();
}

static void run_thread(size_t thread) {
  InProgram inside;
  try {
    run_calls(thread);
  } catch (const std::exception& error) {
    InProgram outside(false);
    explorer().fail(std::string("an exception: ") + error.what());
  }
}

// ---- ranks -------------------------------------------------------------------------------------------------------

static uint64_t own_state(size_t rank) {
  const SharedMemoryGroup& group = *groups[rank];
  uint64_t hash = rank;
  for (uint64_t part : {group.first_call_, group.next_call_, group.next_round_, group.all_finished_, group.enter_.round,
                        group.enter_.call, group.reduce_.round, group.reduce_.call, group.finish_.round,
                        group.finish_.call, uint64_t{group.own_error_.empty()}, uint64_t{group.is_closed_}})
    hash = mixed(hash, part);
  for (const auto& peer : group.peers_) {
    hash = mixed(hash, peer.releases);
    for (const auto& segment : peer.segments) hash = mixed(hash, segment.first);
  }
  return hash;
}

Program prepare(const Scenario& chosen) {
  scenario = chosen;
  psengine::kYields = scenario.sleeps ? 0 : 1 << 30;
  clear_arena();
  Program program;
  program.threads = scenario.ranks + scenario.has_helper;
  char* ended = allocate_shared(psengine::kPageBytes);
  for (size_t rank = 0; rank < scenario.ranks; ++rank)
    program.ended.push_back(reinterpret_cast<uintptr_t>(ended) + 8 * rank);
  size_t control_bytes = SharedMemoryGroup::control_bytes(scenario.ranks, psengine::kPageBytes);
  int file = make_file(allocate_shared(control_bytes), control_bytes);
  for (size_t rank = 0; rank < scenario.ranks; ++rank) {
    InProgram inside;
    rank_of_setup = rank;
    // Among what is checked for races where a rank has two threads.
    void* place = scenario.has_helper ? allocate_shared(sizeof(SharedMemoryGroup)) : operator new(sizeof(SharedMemoryGroup));
    groups[rank] = new (place)
        SharedMemoryGroup(file, psengine::kPageBytes, rank, scenario.ranks, /*token=*/1, psengine::Order::ring);
    segments[rank] = allocate_shared(2 * psengine::kPageBytes);
    tensors[rank] = new double[16 * scenario.calls.size()]();
  }
  for (size_t rank = 0; rank < scenario.ranks; ++rank) {
    InProgram inside;
    rank_of_setup = rank;
    groups[rank]->watch_peers();
    int own_file = make_file(segments[rank], 2 * psengine::kPageBytes);
    segment_indices[rank] = groups[rank]->adopt_segment(own_file, 2 * psengine::kPageBytes, segments[rank]);
  }
  for (size_t thread = 0; thread < program.threads; ++thread)
    program.rank_of.push_back(thread == scenario.ranks ? 0 : thread);
  program.run = run_thread;
  program.own_state = own_state;
  program.victim = scenario.victim;
  program.early_timeouts = scenario.early_timeouts;
  program.does_time_pass = scenario.late >= 0;
  unexplored_word = reinterpret_cast<uintptr_t>(&groups[0]->header().notified_ns);
  keep_arena();
  explorer().memory.watch(reinterpret_cast<uintptr_t>(shared_begin()), shared_bytes_in_use());
  explorer().restore = restore_arena;
  return program;
}

// ---- the list ----------------------------------------------------------------------------------------------------

std::vector<Scenario> all_scenarios() {
  std::vector<Scenario> list;
  auto add = [&](std::string name, size_t ranks, std::vector<Way> calls, std::function<void(Scenario&)> change = {}) {
    Scenario made;
    made.name = name;
    made.ranks = ranks;
    made.calls = calls;
    if (change) change(made);
    list.push_back(made);
  };
  struct Kind {
    std::string name;
    std::vector<Way> calls;
  };
  for (size_t ranks : {2, 3}) {
    std::string of = std::to_string(ranks) + "_ranks";
    std::vector<Kind> kinds = {
        {"in_place", {Way::in_place, Way::in_place, Way::in_place}},
        {"one_chunk", {Way::one_chunk, Way::one_chunk, Way::one_chunk}},
        {"contributions", {Way::contributions, Way::contributions, Way::contributions}},
        {"staged", {Way::staged, Way::staged, Way::staged}},
        {"staged_chunk", {Way::staged_chunk, Way::staged_chunk, Way::staged_chunk}},
        {"small", {Way::small, Way::small, Way::small}},
        {"gather", {Way::gather, Way::gather, Way::gather}},
        {"scatter", {Way::scatter, Way::scatter, Way::scatter}},
        {"broadcast", {Way::broadcast, Way::broadcast, Way::broadcast}},
        {"mixed", {Way::in_place, Way::small, Way::barrier}},
    };
    for (const Kind& kind : kinds) {
      for (size_t count = 1; count <= kind.calls.size(); ++count) {
        std::vector<Way> calls(kind.calls.begin(), kind.calls.begin() + static_cast<long>(count));
        std::string name = kind.name + "_" + std::to_string(count) + "_" + of;
        add(name, ranks, calls);
        add(name + "_sleeping", ranks, calls, [](Scenario& s) { s.sleeps = true; });
        if (count > 1) add(name + "_overlapping", ranks, calls, [](Scenario& s) { s.overlaps = true; });
        for (int victim = 0; victim < static_cast<int>(ranks); ++victim)
          add(name + "_death_of_" + std::to_string(victim), ranks, calls, [=](Scenario& s) {
            s.sleeps = true;
            s.victim = victim;
          });
        add(name + "_death_of_1_early", ranks, calls, [=](Scenario& s) {
          s.sleeps = true;
          s.victim = 1;
          s.early_timeouts = 1;
        });
        add(name + "_leaving", ranks, calls, [](Scenario& s) { s.leaves = true; });
        add(name + "_leaving_sleeping", ranks, calls, [](Scenario& s) { s.leaves = s.sleeps = true; s.early_timeouts = 1; });
        add(name + "_late", ranks, calls, [](Scenario& s) { s.sleeps = true; s.late = 1; });
        add(name + "_differing", ranks, calls, [](Scenario& s) { s.differs = 1; });
        add(name + "_two_threads", ranks, calls, [](Scenario& s) { s.has_helper = true; });
        add(name + "_two_threads_sleeping", ranks, calls, [](Scenario& s) { s.has_helper = s.sleeps = true; });
      }
    }
  }
  return list;
}

}  // namespace check
