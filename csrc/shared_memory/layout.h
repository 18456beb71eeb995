// The control block of a shared-memory group, as every rank maps it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shared_memory/group.h"
#include "shared_memory/sizes.h"

namespace psengine {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<int64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free,
              "processes share these");

constexpr size_t kCacheLineBytes = 64;
constexpr size_t kPageBytes = 4096;
constexpr size_t kStatuses = static_cast<size_t>(WaitStatus::interrupted);  // those that ranks tell each other

// What one rank called, as the others compare and use it: a cache line, so that a rank that waits for another's arrival
// has what it called too.
struct alignas(kCacheLineBytes) Descriptor {
  // Written last, with release: whoever reads it with acquire sees the rest, and what the rank had put into its slot. A
  // plain store would do on x86, whose stores are seen in their order; on ARM it would not.
  std::atomic<uint64_t> round;
  uint64_t numel;  // elements, or bytes for operations that do not compute
  double scale;
  Operation operation;
  ScalarKind kind;
  uint32_t source_rank;
  uint32_t is_staged;
  uint32_t segment_slot;
  uint32_t segment_id;
  uint64_t offset_bytes;  // of the tensor in its segment
  uint64_t owners;        // a digest of whose the contributions are; 0: none
};
static_assert(sizeof(Descriptor) == kCacheLineBytes);

struct Segment {
  std::atomic<uint32_t> id;  // 0: none
  std::atomic<int32_t> file_descriptor;
  std::atomic<uint64_t> bytes;
};

// Written by their rank alone, read by all. Lines apart, because one that another rank has read must be fetched back to
// be written: arrivals are read of descriptors, and `finished` only where a place is used again.
struct alignas(kCacheLineBytes) RankRegion {
  std::atomic<uint64_t> arrived;
  alignas(kCacheLineBytes) std::atomic<uint64_t> finished;
  alignas(kCacheLineBytes) std::atomic<uint64_t> summing;  // the round of which it may hold a claimed chunk; 0: none
  std::atomic<uint64_t> releases;  // segments released so far
  std::atomic<uint32_t> is_closed;
  std::atomic<int64_t> process_id;
  alignas(kCacheLineBytes) Segment segments[kMaxSegments];
  Descriptor descriptors[kRingRounds];
};

// A round in which chunks are claimed. Each word holds the round in its upper half and a count in its lower, so that a
// word left over from the round that used this place before counts as zero.
struct alignas(kCacheLineBytes) Round {
  std::atomic<uint64_t> claimed;
  alignas(kCacheLineBytes) std::atomic<uint64_t> done;
};

struct alignas(kPageBytes) ControlHeader {
  std::atomic<uint32_t> notifications;  // the word sleepers sleep on
  std::atomic<uint32_t> sleepers;
  std::atomic<int64_t> notified_ns;  // when sleepers were notified last
  alignas(kCacheLineBytes) std::atomic<uint64_t> failed_ranks[kStatuses];  // by WaitStatus
  std::atomic<uint64_t> failed_round;  // in which ranks called different operations; 0: none
  std::atomic<int32_t> failure;        // a WaitStatus; done: none
};

struct alignas(kPageBytes) SegmentHeader {
  uint64_t id;
  uint64_t token;
};

inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

inline size_t slots_offset(size_t world_size) {
  return round_up(sizeof(ControlHeader) + kRingRounds * sizeof(Round) + world_size * sizeof(RankRegion), kPageBytes);
}

// ---- where a group's parts lie in its control block ----

inline RankRegion& SharedMemoryGroup::region(size_t rank) const {
  auto* regions = reinterpret_cast<RankRegion*>(control_.data() + sizeof(ControlHeader) + kRingRounds * sizeof(Round));
  return regions[rank];
}

inline Round& SharedMemoryGroup::round_state(uint64_t round) const {
  return reinterpret_cast<Round*>(control_.data() + sizeof(ControlHeader))[round % kRingRounds];
}

inline Descriptor& SharedMemoryGroup::descriptor(size_t rank, uint64_t round) const {
  return region(rank).descriptors[round % kRingRounds];
}

inline char* SharedMemoryGroup::slot(size_t rank, uint64_t round) const {
  return control_.data() + slots_offset(world_size_) + (rank * kSlots + round % kSlots) * slot_bytes_;
}

inline ControlHeader& SharedMemoryGroup::header() const { return *reinterpret_cast<ControlHeader*>(control_.data()); }

}  // namespace psengine
