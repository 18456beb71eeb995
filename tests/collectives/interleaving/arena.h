// The memory of the program that is explored: what its ranks share, and what they allocate; put back before each execution.
#pragma once

#include <cstddef>
#include <cstdint>

namespace check {

constexpr size_t kSharedBytes = 256 * 1024, kOwnBytes = 512 * 1024;

// Whole pages of shared memory, zeroed.
char* allocate_shared(size_t bytes);
size_t shared_bytes_in_use();
char* shared_begin();

void clear_arena();
void keep_arena();     // as it is now
void restore_arena();  // as it was kept

// What is allocated while one lives comes from the arena, and is not freed one by one.
class InProgram {
 public:
  explicit InProgram(bool is_in = true);
  ~InProgram();
  InProgram(const InProgram&) = delete;
  InProgram& operator=(const InProgram&) = delete;

 private:
  bool was_in_;
};

// Shared memory by the file that it would be: a path such as /proc/<process>/fd/<file>.
constexpr int64_t kFirstProcess = 1000;
int make_file(char* memory, size_t bytes);

// A word that is read and written outside of the exploration, because nothing but the length of waits depends on it.
extern uintptr_t unexplored_word;

// While a scenario is set up: the rank that this thread is.
extern size_t rank_of_setup;

}  // namespace check
