// Memory between threads as C++ allows it, with nothing that a machine (x86, ARM) happens to promise beyond.
//
// Each atomic word keeps the values that were stored in it. A thread may read any of them that is not older than what
// it knows of: its view, which holds for every word the oldest value it may still see. A release stores the view with
// the value, an acquire takes it over, and a sequentially consistent fence exchanges it with those before it (the views
// of Kang et al., A Promising Semantics for Relaxed-Memory Concurrency, POPL 2017, without promises).
//
// Plain memory is held to happens-before alone, by clocks: an access that is not ordered after another thread's is a
// data race, whatever values were seen.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace check {

constexpr size_t kMaxWords = 112, kMaxThreads = 4;

struct View {
  std::array<uint16_t, kMaxWords> seen{};   // by word: the number of the oldest value that may still be read
  std::array<uint16_t, kMaxThreads> clock{};  // by thread: its accesses up to this epoch happened before
  void join_seen(const View& other) {
    for (size_t i = 0; i < kMaxWords; ++i) seen[i] = std::max(seen[i], other.seen[i]);
  }
  void join(const View& other) {
    join_seen(other);
    for (size_t i = 0; i < kMaxThreads; ++i) clock[i] = std::max(clock[i], other.clock[i]);
  }
};

struct Value {
  uint64_t bits;
  View view;  // what whoever acquires it gets to know
};

struct Word {
  uintptr_t address = 0;
  uint32_t bytes = 0;
  uint32_t writers = 0;  // threads, in any execution so far
  std::vector<Value> values;
};

struct ThreadViews {
  View current, acquired, released;  // acquired: by relaxed loads, for a later fence
};

struct Access {
  uint8_t writer = 0;  // thread + 1
  uint16_t written = 0;
  std::array<uint16_t, kMaxThreads> read{};
  bool is_used = false;
};

inline uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

// What an atomic access orders.
constexpr bool acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
constexpr bool releases(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_ACQUIRE && order != __ATOMIC_CONSUME; }

class Memory {
 public:
  // Memory at [begin, begin + bytes) is shared; its plain accesses are checked.
  void watch(uintptr_t begin, size_t bytes);
  bool is_watched(uintptr_t address) const { return address - begin_ < bytes_; }
  std::string name(uintptr_t address) const { return "shared byte " + std::to_string(address - begin_); }

  // All words hold what is in memory, and everything so far happened before everything to come.
  void start(size_t threads);

  size_t word_at(uintptr_t address, size_t bytes);
  Word& word(size_t index) { return words_[index]; }
  size_t words() const { return words_.size(); }
  ThreadViews& thread(size_t thread) { return threads_[thread]; }

  // A word that no other thread has stored to in any execution so far: when an access to it happens is nobody's concern.
  bool is_own(size_t index, size_t thread) const { return (words_[index].writers & ~(1u << thread)) == 0; }
  // Set as soon as a word gets a writer that it had not in any execution before: what was its owner's concern no longer is.
  bool has_new_writer = false;

  uint64_t read(size_t thread, size_t index, size_t number, int order);
  // `number`: the value that a read-modify-write replaces, or none.
  void store(size_t thread, size_t index, uint64_t bits, int order, bool is_read_modify_write);
  void fence(size_t thread);

  // Empty, or what is wrong with it.
  std::string plain(size_t thread, uintptr_t address, size_t bytes, bool is_write);

  // Of everything that threads in `live` may still see.
  uint64_t hash(uint32_t live) const;
  // The oldest value of a word that a thread in `live` may still read.
  uint16_t oldest(size_t index, uint32_t live) const;

 private:
  uintptr_t begin_ = 0;
  size_t bytes_ = 0;
  std::vector<Word> words_;
  std::unordered_map<uintptr_t, size_t> indices_;
  std::array<ThreadViews, kMaxThreads> threads_;
  size_t thread_count_ = 0;
  View fenced_;  // what the fences so far have made known; its clock is not used: a fence alone orders no plain access
  std::vector<Access> accesses_;
  std::vector<uint32_t> accessed_;
};

}  // namespace check
