#include "explorer.h"

#include "arena.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <time.h>

extern "C" void* __cxa_get_globals();

namespace check {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint64_t kMaxSteps = 20'000;  // of one execution; more is a loop that does not end
constexpr uint64_t kDoesRun = 0, kIsDead = 1;
constexpr uint16_t kOwnRank = UINT16_MAX;
constexpr int64_t kTimeoutNs = 100'000'000;

Explorer& explorer() {
  static Explorer instance;
  return instance;
}

double now_s() {
  struct timespec now {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// ---- fibers ------------------------------------------------------------------------------------------------------

void Explorer::enter_fiber() {
  Explorer& self = explorer();
  size_t number = self.running_number();
  self.program_->run(number);
  self.running_->is_finished = true;
  self.switch_to_scheduler();
}

void Explorer::switch_to_scheduler() {
  Fiber& fiber = *running_;
  std::memcpy(fiber.caught, __cxa_get_globals(), sizeof(fiber.caught));
  if (_setjmp(fiber.context) == 0) _longjmp(scheduler_, 1);
}

void Explorer::resume(Fiber& fiber) {
  running_ = &fiber;
  uintptr_t caught[2];
  std::memcpy(caught, __cxa_get_globals(), sizeof(caught));
  std::memcpy(__cxa_get_globals(), fiber.caught, sizeof(caught));
  if (_setjmp(scheduler_) == 0) {
    if (fiber.is_started) _longjmp(fiber.context, 1);
    fiber.is_started = true;
    setcontext(&fiber.start);
  }
  std::memcpy(__cxa_get_globals(), caught, sizeof(caught));
  running_ = nullptr;
}

void Explorer::fail(const std::string& what) {
  InProgram outside(false);
  failure_.assign(what.begin(), what.end());  // a copy, which outlives the program's memory
  if (running_ != nullptr) {
    say(running_number(), "FAILS: " + what, 0);
    switch_to_scheduler();
  }
  std::abort();
}

// ---- what threads do ---------------------------------------------------------------------------------------------

bool Explorer::has_threads(size_t rank) const {
  size_t threads = 0;
  for (size_t of : program_->rank_of) threads += of == rank;
  return threads > 1;
}

bool Explorer::is_rank_dead(size_t rank) const {
  for (const Fiber& fiber : fibers_)
    if (fiber.rank == rank && fiber.is_dead) return true;
  return false;
}

void Explorer::forget_history(uint64_t place) {
  running_->history = mixed(place, program_->own_state(running_->rank));
  running_->looked_at.clear();
}

// Whether it matters to others when it happens.
bool Explorer::is_noticed(const Step& step, size_t thread) const {
  switch (step.kind) {
    case Kind::load:
    case Kind::store:
    case Kind::modify:
      return !memory.is_own(step.word, thread);
    default:
      return true;
  }
}

uint64_t Explorer::perform(Step step) {
  Fiber& fiber = *running_;
  size_t thread = running_number();
  // Whoever dies between two stores leaves the same behind, wherever it was.
  if (fiber.is_fate_open && !is_anyone_dead_) {
    fiber.is_fate_open = false;
    fiber.pending = Step{};
    fiber.pending.kind = Kind::fate;
    fiber.pending.word = memory.word_at(program_->ended[fiber.rank], sizeof(uint64_t));
    fiber.pending.site = step.site;
    switch_to_scheduler();
  }
  if (!is_noticed(step, thread)) return apply_now(thread, step, memory.word(step.word).values.size() - 1);
  fiber.pending = step;
  switch_to_scheduler();
  return fiber.result;
}

void Explorer::plain(uintptr_t address, size_t bytes, bool is_write, uintptr_t site) {
  if (bytes == 0) return;
  std::string wrong = memory.plain(running_number(), address, bytes, is_write);
  if (wrong.empty()) return;
  say(running_number(), "accesses " + memory.name(address), site);
  fail("data race: " + wrong + ", at " + memory.name(address));
}

void Explorer::wake(size_t word) {
  for (Fiber& fiber : fibers_) {
    if (fiber.pending.kind != Kind::asleep || fiber.pending.word != word || fiber.is_woken) continue;
    fiber.is_woken = true;
  }
}

Explorer::Lock& Explorer::lock_of(uintptr_t mutex) {
  for (Lock& lock : locks_)
    if (lock.mutex == mutex) return lock;
  locks_.push_back({mutex, -1, View{}});
  return locks_.back();
}

void Explorer::lock(const Step& step) {
  lock_of(step.operand);
  perform(step);
}

void Explorer::unlock(uintptr_t mutex) {
  Lock& lock = lock_of(mutex);
  View& view = memory.thread(running_number()).current;
  lock.holder = -1;
  lock.view = view;
  ++view.clock[running_number()];
}

// ---- transitions -------------------------------------------------------------------------------------------------

static uint64_t modified(const Step& step, uint64_t bits) {
  switch (step.modify) {
    case Modify::add: return bits + step.operand;
    case Modify::subtract: return bits - step.operand;
    case Modify::bit_or: return bits | step.operand;
    default: return step.operand;
  }
}

uint64_t Explorer::apply_now(size_t thread, const Step& step, size_t number) {
  Fiber& fiber = fibers_[thread];
  ++steps_;
  uint64_t result = 0;
  if (is_tracing_) say(thread, step_text(step, number), step.site);
  auto look = [&](int order) {
    result = memory.read(thread, step.word, number, order);
    auto word = static_cast<uint16_t>(step.word);
    for (auto& looked : fiber.looked_at)
      if (looked.first == word) {
        looked.second = static_cast<uint16_t>(number);
        return;
      }
    fiber.looked_at.emplace_back(word, static_cast<uint16_t>(number));
  };
  switch (step.kind) {
    case Kind::load:
      look(step.order);
      break;
    case Kind::store:
      memory.store(thread, step.word, step.operand, step.order, false);
      fiber.is_fate_open = static_cast<int>(thread) == program_->victim;
      break;
    case Kind::modify: {
      if (step.modify == Modify::compare && memory.word(step.word).values[number].bits != step.expected) {
        look(step.failure_order);
        break;
      }
      look(step.order);
      uint64_t mask = memory.word(step.word).bytes == 8 ? ~uint64_t{0} : 0xffffffff;
      memory.store(thread, step.word, modified(step, result) & mask, step.order, true);
      fiber.is_fate_open = static_cast<int>(thread) == program_->victim;
      break;
    }
    case Kind::fence:
      memory.fence(thread);
      break;
    default:
      break;
  }
  fiber.history = mixed(mixed(fiber.history, (static_cast<uint64_t>(step.kind) << 32) + step.word), result);
  return result;
}

void Explorer::find_options() {
  options_.clear();
  for (size_t thread = 0; thread < fibers_.size(); ++thread) {
    if (fibers_[thread].pending.kind != Kind::fate || fibers_[thread].is_finished || fibers_[thread].is_dead) continue;
    for (uint64_t fate : {kDoesRun, kIsDead})
      options_.push_back({static_cast<uint8_t>(thread), static_cast<uint16_t>(fate)});
    return;
  }
  for (size_t thread = 0; thread < fibers_.size(); ++thread) {
    const Fiber& fiber = fibers_[thread];
    if (fiber.is_finished || fiber.is_dead) continue;
    const Step& step = fiber.pending;
    auto offer = [&](size_t number) {
      options_.push_back({static_cast<uint8_t>(thread), static_cast<uint16_t>(number)});
    };
    switch (step.kind) {
      case Kind::load:
      case Kind::modify: {
        const auto& values = memory.word(step.word).values;
        size_t newest = values.size() - 1;
        bool is_compare = step.modify == Modify::compare;
        size_t oldest = step.kind == Kind::load || is_compare ? memory.thread(thread).current.seen[step.word] : newest;
        for (size_t number = newest + 1; number-- > oldest;) {
          // Only the newest value can be replaced, and only another than the expected one is a reason not to.
          if (step.kind == Kind::modify && is_compare && number != newest && values[number].bits == step.expected) continue;
          offer(number);
        }
        break;
      }
      case Kind::yield: {
        // What was stored becomes visible in finite time: whoever waits goes on when there is something that it has
        // not seen, and sees at least one of that.
        for (const auto& [word, number] : fiber.looked_at)
          if (memory.word(word).values.size() - 1 > number) offer(word);
        // Or another thread of its rank has moved on.
        if (mixed(step.site, program_->own_state(fiber.rank)) != step.expected) offer(kOwnRank);
        break;
      }
      case Kind::lock:
        for (const Lock& lock : locks_)
          if (lock.mutex == step.operand && lock.holder < 0) offer(0);
        break;
      case Kind::asleep:
        if (fiber.is_woken || fiber.early_timeouts > 0) offer(fiber.is_woken ? 0 : 1);
        break;
      default:
        offer(0);
    }
  }
  if (!options_.empty() || !(is_anyone_dead_ || program_->does_time_pass)) return;
  for (size_t thread = 0; thread < fibers_.size(); ++thread)
    if (!fibers_[thread].is_finished && !fibers_[thread].is_dead && fibers_[thread].pending.kind == Kind::asleep)
      options_.push_back({static_cast<uint8_t>(thread), 2});
}

void Explorer::apply(const Option& option) {
  size_t thread = option.thread;
  Fiber& fiber = fibers_[thread];
  Step step = fiber.pending;
  View& view = memory.thread(thread).current;
  fiber.pending.kind = Kind::none;
  switch (step.kind) {
    case Kind::fate:
      if (option.number == kIsDead) {
        fiber.is_dead = is_anyone_dead_ = true;
        ++deaths_;
        say(thread, "DIES", step.site);
        for (Lock& lock : locks_)
          if (lock.holder == static_cast<int>(thread)) lock.holder = -1;
        // Who sees that a process has ended sees all that it did.
        memory.store(thread, step.word, 1, __ATOMIC_RELEASE, false);
        return;
      }
      break;
    case Kind::yield: {
      say(thread, "waits until it sees a newer " + (option.number == kOwnRank ? "state of its rank" : memory.name(memory.word(option.number).address)), step.site);
      for (const auto& [word, number] : fiber.looked_at)
        if (word == option.number) view.seen[word] = std::max<uint16_t>(view.seen[word], static_cast<uint16_t>(number + 1));
      fiber.looked_at.clear();
      break;
    }
    case Kind::sleep: {
      // The kernel compares under its lock with what is there; nobody reads older values after that.
      const auto& values = memory.word(step.word).values;
      view.seen[step.word] = static_cast<uint16_t>(values.size() - 1);
      if (values.back().bits == step.expected) {
        say(thread, "sleeps", step.site);
        fiber.pending = step;
        fiber.pending.kind = Kind::asleep;
        fiber.is_woken = false;
        return;
      }
      say(thread, "does not sleep: there is news", step.site);
      break;
    }
    case Kind::asleep:
      say(thread, option.number == 0 ? "is woken" : "wakes up by itself", step.site);
      view.seen[step.word] = static_cast<uint16_t>(memory.word(step.word).values.size() - 1);
      if (option.number != 0) fiber.now_ns += kTimeoutNs;
      if (option.number == 1) --fiber.early_timeouts;
      // Nothing else happens any more: by the end of a sleep all of it is visible, though it orders nothing.
      if (option.number == 2)
        for (size_t word = 0; word < memory.words(); ++word)
          view.seen[word] = static_cast<uint16_t>(memory.word(word).values.size() - 1);
      break;
    case Kind::lock: {
      Lock& lock = lock_of(step.operand);
      lock.holder = static_cast<int>(thread);
      view.join(lock.view);
      fiber.history = mixed(fiber.history, program_->own_state(fiber.rank));
      break;
    }
    default:
      fiber.result = apply_now(thread, step, option.number);
  }
  resume(fiber);
}

uint64_t Explorer::state_hash() {
  uint32_t live = 0;
  uint64_t hash = is_anyone_dead_;
  for (size_t thread = 0; thread < fibers_.size(); ++thread)
    if (!fibers_[thread].is_finished && !fibers_[thread].is_dead) live |= 1u << thread;
  for (size_t thread = 0; thread < fibers_.size(); ++thread) {
    const Fiber& fiber = fibers_[thread];
    hash = mixed(hash, (fiber.is_finished ? 1 : 0) + (fiber.is_dead ? 2 : 0) + (fiber.is_woken ? 4 : 0) +
                           (fiber.is_fate_open ? 8 : 0));
    if (fiber.is_finished || fiber.is_dead) continue;
    const Step& step = fiber.pending;
    hash = mixed(hash, fiber.history);
    hash = mixed(hash, (static_cast<uint64_t>(step.kind) << 32) + step.word);
    hash = mixed(hash, step.operand);
    hash = mixed(hash, step.expected);
    hash = mixed(hash, step.site);
    hash = mixed(hash, static_cast<uint64_t>(fiber.now_ns + fiber.early_timeouts));
    if (step.kind == Kind::yield)
      for (const auto& [word, number] : fiber.looked_at)
        if (!memory.is_own(word, thread)) {
          auto oldest = memory.oldest(word, live);
          hash = mixed(hash, (uint64_t{word} << 32) + std::max(number, oldest) - oldest);
        }
  }
  for (const Lock& lock : locks_) hash = mixed(hash, static_cast<uint64_t>(lock.holder + 1));
  return mixed(hash, memory.hash(live));
}

bool Explorer::insert_state(uint64_t hash) {
  if (hash == 0) hash = 1;
  if ((states_ + 1) * 2 > table_.size()) {
    std::vector<uint64_t> larger(std::max<size_t>(1 << 16, 2 * table_.size()));
    for (uint64_t old : table_) {
      if (old == 0) continue;
      size_t place = old & (larger.size() - 1);
      while (larger[place] != 0) place = (place + 1) & (larger.size() - 1);
      larger[place] = old;
    }
    table_.swap(larger);
  }
  size_t place = hash & (table_.size() - 1);
  while (table_[place] != 0) {
    if (table_[place] == hash) return false;
    place = (place + 1) & (table_.size() - 1);
  }
  table_[place] = hash;
  ++states_;
  return true;
}

// ---- the search --------------------------------------------------------------------------------------------------

Explorer::End Explorer::execute() {
  restore();
  depth_ = 0;
  steps_ = 0;
  is_anyone_dead_ = false;
  locks_.clear();
  failure_.clear();
  for (size_t rank = 0; rank < fibers_.size(); ++rank) {
    Fiber& fiber = fibers_[rank];
    std::vector<char> stack;
    stack.swap(fiber.stack);
    auto looked_at = std::move(fiber.looked_at);
    looked_at.clear();
    fiber = Fiber{};
    fiber.stack.swap(stack);
    fiber.looked_at = std::move(looked_at);
    if (fiber.stack.empty()) fiber.stack.resize(kStackBytes);
    fiber.rank = program_->rank_of[rank];
    fiber.early_timeouts = program_->early_timeouts;
    fiber.is_fate_open = static_cast<int>(rank) == program_->victim;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, &Explorer::enter_fiber, 0);
  }
  memory.start(fibers_.size());
  for (Fiber& fiber : fibers_) {
    resume(fiber);
    if (!failure_.empty()) return End::failed;
  }
  while (true) {
    find_options();
    if (options_.empty()) {
      for (const Fiber& fiber : fibers_)
        if (!fiber.is_finished && !fiber.is_dead) {
          failure_ = fiber.pending.kind == Kind::asleep ? "a rank sleeps for ever" : "a rank waits for ever";
          say(static_cast<size_t>(&fiber - fibers_.data()), "FAILS: " + failure_, fiber.pending.site);
          return End::failed;
        }
      return End::complete;
    }
    if (++steps_ > kMaxSteps) {
      failure_ = "more than " + std::to_string(kMaxSteps) + " steps: a loop that does not end";
      return End::failed;
    }
    size_t taken = 0;
    if (options_.size() > 1) {
      if (depth_ == choices_.size()) {
        if (!insert_state(state_hash())) return End::seen_before;
        choices_.push_back({0, static_cast<uint16_t>(options_.size())});
      }
      taken = choices_[depth_++].taken;
    }
    Option option = options_[taken];
    apply(option);
    if (!failure_.empty()) return End::failed;
  }
}

Outcome Explorer::explore(const Program& program, uint64_t max_states, double max_s) {
  program_ = &program;
  fibers_.resize(program.threads);
  for (size_t index = 0; index < memory.words(); ++index) memory.word(index).writers = 0;
  // All restarts together find who stores to what; the last one explores with all of it known.
  Outcome outcome;
  double began_s = now_s();
  choices_.clear();
  auto forget = [&] {
    choices_.clear();
    table_.clear();
    states_ = 0;
  };
  forget();
  while (true) {
    memory.has_new_writer = false;
    uint64_t deaths_before = deaths_;
    End end = execute();
    ++outcome.executions;
    outcome.deaths += end == End::complete ? deaths_ - deaths_before : 0;
    outcome.steps += steps_;
    outcome.longest = std::max(outcome.longest, steps_);
    if (end == End::failed) {
      outcome.failure = failure_;
      is_tracing_ = true;
      trace_.clear();
      execute();
      is_tracing_ = false;
      outcome.trace = trace_;
      break;
    }
    if (memory.has_new_writer) {
      forget();
      continue;
    }
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().count) choices_.pop_back();
    if (choices_.empty()) break;
    ++choices_.back().taken;
    if (states_ >= max_states || (outcome.executions % 256 == 0 && now_s() - began_s > max_s)) {
      outcome.is_exhaustive = false;
      break;
    }
  }
  outcome.states = states_;
  program_ = nullptr;
  return outcome;
}

// ---- telling -----------------------------------------------------------------------------------------------------

void Explorer::say(size_t thread, const std::string& what, uintptr_t site) {
  if (!is_tracing_) return;
  char place[32] = "";
  if (site != 0) std::snprintf(place, sizeof(place), " @%lx", static_cast<unsigned long>(site - 1));
  trace_.push_back("thread " + std::to_string(thread) + " (rank " + std::to_string(fibers_[thread].rank) + ") " + what + place);
}

std::string Explorer::step_text(const Step& step, size_t number) {
  static const char* const orders[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};
  if (step.kind == Kind::fence) return "fences";
  const Word& word = memory.word(step.word);
  std::string name = memory.name(word.address) + " (" + orders[step.order] + ")";
  std::string read = std::to_string(word.values[number].bits) + (number + 1 < word.values.size() ? ", an old value" : "");
  switch (step.kind) {
    case Kind::load: return "reads " + name + ": " + read;
    case Kind::store: return "stores " + name + ": " + std::to_string(step.operand);
    default:
      if (step.modify == Modify::compare && word.values[number].bits != step.expected)
        return "does not exchange " + name + ": " + read;
      return "changes " + name + ": " + read + " to " + std::to_string(modified(step, word.values[number].bits));
  }
}

}  // namespace check
