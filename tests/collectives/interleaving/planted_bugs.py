"""Bugs that the exploration must find: changes of the engine's sources, and the scenario that each is looked for in."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """In ``file`` of csrc/shared_memory, ``old``, which is there once, becomes ``new``."""

    name: str
    scenario: str
    file: str
    old: str
    new: str


# Found by the exploration in 2026. A rank stores its description, then its arrival. Whoever saw the first, and that it
# differs, looked for the second to tell what had been called, and told nothing: the error had no reason in it.
TOLD_BY_ARRIVAL = Bug(
    "descriptions are told by arrival",
    "small_1_2_ranks_differing",
    "agreement.cpp",
    "    return descriptor(rank, round).round.load(std::memory_order_acquire) == round;\n",
    "    return region(rank).arrived.load(std::memory_order_acquire) >= round;\n",
)

# Orderings that are needed, and the scenario in which each is missed when it is relaxed.
ORDERINGS = [
    ("rounds.cpp", "description.round.store(round, std::memory_order_release)", "one_chunk_1_2_ranks"),
    ("rounds.cpp", "return descriptor(rank, round).round.load(std::memory_order_acquire)", "one_chunk_1_2_ranks"),
    ("rounds.cpp", "(round << 32) | (count + 1), std::memory_order_acq_rel", "one_chunk_1_2_ranks"),
    ("rounds.cpp", "round_state(round).done.load(std::memory_order_acquire)", "staged_chunk_1_3_ranks"),
    ("rounds.cpp", "region(rank_).finished.store(round, std::memory_order_release)", "small_3_2_ranks_overlapping"),
    ("rounds.cpp", "region(rank).finished.load(std::memory_order_acquire)", "small_3_2_ranks_overlapping"),
    ("segments.cpp", "segments[slot].id.load(std::memory_order_acquire) != id", "one_chunk_1_2_ranks_leaving"),
]

BUGS = [
    *(
        Bug(f"relaxed: {access}", scenario, file, access, re.sub(r"memory_order_\w+", "memory_order_relaxed", access))
        for file, access, scenario in ORDERINGS
    ),
    TOLD_BY_ARRIVAL,
    Bug(
        "a place used one round too early",
        "small_3_2_ranks_overlapping",
        "rounds.cpp",
        "    uint64_t reused_after = call.is_staged ? kSlots : kRingRounds;",
        "    uint64_t reused_after = 1 + (call.is_staged ? kSlots : kRingRounds);",
    ),
    Bug(
        "a count of the round before counts",
        "one_chunk_3_2_ranks",
        "rounds.cpp",
        "  return (word >> 32) == (round & 0xffffffff) ? word & 0xffffffff : 0;",
        "  (void)round;\n  return word & 0xffffffff;",
    ),
    Bug(
        "no last look before a sleep",
        "small_1_2_ranks_sleeping",
        "waiting.cpp",
        "    is_over = advance() || first_call_ > operation;",
        "    is_over = false;",
    ),
    Bug(
        "a sleeper is not seen, nor sees",
        "small_1_2_ranks_sleeping",
        "waiting.cpp",
        "  header().sleepers.fetch_add(1);\n  std::atomic_thread_fence(std::memory_order_seq_cst);\n",
        "  header().sleepers.fetch_add(1);\n",
    ),
    Bug(
        "a failure is told without its reason",
        "small_1_3_ranks_late",
        "waiting.cpp",
        "  header().failure.compare_exchange_strong(none, static_cast<int32_t>(status));",
        "  header().failure.compare_exchange_strong(none, static_cast<int32_t>(status), std::memory_order_relaxed);",
    ),
    Bug(
        "the dead are not looked for",
        "small_1_2_ranks_death_of_1",
        "waiting.cpp",
        "        if (!is_running(rank)) gone",
        "        if (operation == 0) gone",
    ),
    Bug(
        "whoever sums does not say so",
        "one_chunk_1_2_ranks_death_of_1",
        "rounds.cpp",
        "  region(rank_).summing.store(round, std::memory_order_relaxed);",
        "",
    ),
    Bug(
        "calls are not compared",
        "small_1_2_ranks_differing",
        "agreement.cpp",
        "    if (is_same(own, descriptor(rank, round))) continue;\n",
        "    if (rank < world_size_ || is_same(own, descriptor(rank, round))) continue;\n",
    ),
    Bug(
        "memory that has gone is an error",
        "one_chunk_1_2_ranks_leaving",
        "rounds.cpp",
        "        if (claimed >= call.chunks(round)) return false;\n",
        "        if (claimed > call.chunks(round)) return false;\n",
    ),
    Bug(
        "a wait goes on without the lock",
        "small_1_2_ranks_two_threads",
        "waiting.cpp",
        "      std::lock_guard<std::mutex> lock(mutex_);\n      has_moved = advance();\n",
        "      has_moved = advance();\n",
    ),
]
