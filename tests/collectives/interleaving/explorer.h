// Runs the threads of a program in every order that can be told apart, over memory as weak as memory.h has it.
//
// Each thread is a fiber. It runs up to its next access that others may notice, and stops; the explorer chooses who goes
// on, and which of the values that it may read a load finds. Choices are a depth-first search: each execution begins
// anew, repeats the choices of the last one up to the deepest that has an alternative, and takes that.
//
// What is not chosen, because no thread could tell the difference:
//   - when a store happens to a word that nobody else stores to: whoever is to find the older value finds it later too;
//   - when a load happens of a word that nobody else stores to;
//   - plain accesses: they are held to happens-before, which does not depend on when they happen;
//   - what comes after a state that was seen before: of each, 64 bits of hash are kept.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <functional>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

#include "memory.h"

namespace check {

enum class Kind : uint8_t { none, load, store, modify, fence, yield, sleep, asleep, lock, fate };
enum class Modify : uint8_t { add, subtract, bit_or, exchange, compare };

// An access that a thread is about to make.
struct Step {
  Kind kind = Kind::none;
  Modify modify = Modify::add;
  size_t word = 0;
  int order = __ATOMIC_SEQ_CST, failure_order = __ATOMIC_SEQ_CST;
  uint64_t operand = 0, expected = 0;
  uintptr_t site = 0;  // where in the program
};

struct Fiber {
  size_t rank = 0;
  Step pending;
  uint64_t result = 0;
  uint64_t history = 0;  // of what it did since its own state was hashed: with it, where it is in the program
  std::vector<std::pair<uint16_t, uint16_t>> looked_at;  // words it has read since it last waited, and which value
  bool is_finished = false, is_dead = false, is_woken = false, is_fate_open = false;
  int64_t now_ns = 0;
  int early_timeouts = 0;
  // Switching.
  std::vector<char> stack;
  ucontext_t start;
  jmp_buf context;
  bool is_started = false;
  uintptr_t caught[2] = {0, 0};  // the C++ runtime's exceptions under way
};

struct Program {
  size_t threads = 0;
  std::vector<size_t> rank_of;                      // by thread
  std::function<void(size_t)> run;                  // what a thread does
  std::function<uint64_t(size_t)> own_state;        // a hash of what a rank keeps to itself
  std::vector<uintptr_t> ended;                     // by rank: the word that says whether its process has ended
  int victim = -1;                                  // a thread that may die at any step
  int early_timeouts = 0;                           // how many sleeps of a thread may end before anything happened
  bool does_time_pass = false;                      // sleeps end by themselves where nothing else can happen
};

struct Outcome {
  uint64_t executions = 0, states = 0, steps = 0, deaths = 0, longest = 0;
  bool is_exhaustive = true;
  std::string failure;
  std::vector<std::string> trace;
};

class Explorer {
 public:
  Outcome explore(const Program& program, uint64_t max_states, double max_s);

  // Called by what the threads run on; see stand_ins.cpp.
  bool is_in_thread() const { return running_ != nullptr; }
  Fiber& running() { return *running_; }
  size_t running_number() const { return static_cast<size_t>(running_ - fibers_.data()); }
  bool has_threads(size_t rank) const;
  uint64_t perform(Step step);
  void lock(const Step& step);
  void unlock(uintptr_t mutex);
  void plain(uintptr_t address, size_t bytes, bool is_write, uintptr_t site);
  void wake(size_t word);
  [[noreturn]] void fail(const std::string& what);
  // The thread is at a place where its rank's own state, and `place`, say all that its past has left.
  void forget_history(uint64_t place);
  bool is_rank_dead(size_t rank) const;

  Memory memory;
  std::function<void()> restore;  // memory as it was when the threads began

 private:
  struct Option {
    uint8_t thread;
    uint16_t number;
  };
  struct Choice {
    uint16_t taken, count;
  };
  enum class End { complete, seen_before, failed };

  End execute();
  void resume(Fiber& fiber);
  void switch_to_scheduler();
  bool is_noticed(const Step& step, size_t thread) const;
  void find_options();
  void apply(const Option& option);
  uint64_t apply_now(size_t thread, const Step& step, size_t number);
  uint64_t state_hash();
  bool insert_state(uint64_t hash);
  void say(size_t thread, const std::string& what, uintptr_t site);
  std::string step_text(const Step& step, size_t number);
  static void enter_fiber();

  const Program* program_ = nullptr;
  std::vector<Fiber> fibers_;
  Fiber* running_ = nullptr;
  jmp_buf scheduler_;
  std::vector<Option> options_;
  std::vector<Choice> choices_;
  size_t depth_ = 0;
  std::vector<uint64_t> table_;  // of states seen
  uint64_t states_ = 0;
  struct Lock {
    uintptr_t mutex;
    int holder;
    View view;
  };
  std::vector<Lock> locks_;
  Lock& lock_of(uintptr_t mutex);
  bool is_anyone_dead_ = false;
  std::string failure_;
  bool is_tracing_ = false;
  std::vector<std::string> trace_;
  uint64_t steps_ = 0, deaths_ = 0;
};

Explorer& explorer();

double now_s();

}  // namespace check
