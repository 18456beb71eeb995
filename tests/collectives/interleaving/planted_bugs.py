"""Bugs that the exploration must find: changes of the engine's sources, and the scenario that each is looked for in."""

from __future__ import annotations

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

BUGS = [
    TOLD_BY_ARRIVAL,
    Bug(
        "ready before the data is there",
        "small_1_2_ranks",
        "rounds.cpp",
        "  description.numel = call.numel;\n",
        "  description.round.store(round, std::memory_order_release);\n  description.numel = call.numel;\n",
    ),
    Bug(
        "a claim in two steps",
        "one_chunk_1_2_ranks",
        "rounds.cpp",
        "    if (word.compare_exchange_weak(seen, (round << 32) | (count + 1), std::memory_order_acq_rel))",
        "    if (word.store((round << 32) | (count + 1), std::memory_order_release), true)",
    ),
    Bug(
        "done counted twice",
        "in_place_1_2_ranks",
        "rounds.cpp",
        "    if (add_one(state.done, round, chunks) == chunks - 1) notify();",
        "    for (int twice = 0; twice < 2; ++twice) add_one(state.done, round, chunks);",
    ),
    Bug(
        "done before the sum",
        "one_chunk_1_2_ranks",
        "rounds.cpp",
        "    uint64_t begin = chunk * chunk_numel;\n",
        "    uint64_t begin = chunk * chunk_numel;\n    add_one(state.done, round, chunks);\n",
    ),
    Bug(
        "finished before it was read",
        "small_3_2_ranks_overlapping",
        "rounds.cpp",
        "    finish(call, round);\n",
        "    region(rank_).finished.store(round, std::memory_order_release);\n    finish(call, round);\n",
    ),
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
