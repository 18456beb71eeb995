// Small programs of a few ranks over the engine, and what must be true of each of their executions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "explorer.h"

namespace check {

// What a rank calls. All-reduces in memory that all have mapped, and through slots: of two chunks, of one, and of a value. Of
// contributions rank 0 has two.
enum class Way { in_place, one_chunk, contributions, staged, staged_chunk, small, broadcast, gather, scatter, barrier };

struct Scenario {
  std::string name;
  size_t ranks;
  std::vector<Way> calls;
  bool sleeps = false;           // waits sleep at once; else they never do
  int victim = -1;               // a rank that may be killed at any step
  bool overlaps = false;         // all calls are begun before the first is waited for
  bool leaves = false;           // every rank releases its memory and closes its end as soon as it is through
  bool has_helper = false;       // rank 0 waits for its last call in a second thread
  int late = -1;                 // a rank that calls nothing
  int differs = -1;              // a rank that calls something else
  int early_timeouts = 0;
};

std::vector<Scenario> all_scenarios();

// Makes the ranks of a scenario, in memory that is kept; the program that the explorer runs.
Program prepare(const Scenario& scenario);

}  // namespace check
