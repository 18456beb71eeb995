// The sizes that cost time or memory, and nothing else: the protocol is right with any of them.
//
// tests/collectives/interleaving compiles the same sources with smaller ones, so that places are used again soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace psengine {

// How many rounds a rank may be ahead of the slowest; at least kSlots.
constexpr uint64_t kRingRounds = 32;
// Rounds that have a staging slot at the same time: one being filled, one summed, one emptied, one to spare.
constexpr uint64_t kSlots = 4;
constexpr size_t kMaxSegments = 64;
// A claim costs a hundred nanoseconds; this much summing takes over ten times as long.
constexpr size_t kChunkBytes = 128 * 1024;
// Up to this size every rank sums everything for itself: reading W times this is cheaper than another round trip.
constexpr size_t kSmallBytes = 16 * 1024;
// Looks at what other ranks do before a wait sleeps, where ranks share cores.
constexpr int kYields = 16;

}  // namespace psengine
