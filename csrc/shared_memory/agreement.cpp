// Have all ranks called the same operation? If not, what did they call?
#if defined(__linux__)

#include <cstring>
#include <iterator>
#include <string>

#include "shared_memory/call.h"
#include "shared_memory/layout.h"

namespace psengine {

static bool is_same(const Descriptor& one, const Descriptor& other) {
  return one.operation == other.operation && one.numel == other.numel && one.kind == other.kind &&
         std::memcmp(&one.scale, &other.scale, sizeof(one.scale)) == 0 && one.source_rank == other.source_rank &&
         one.is_staged == other.is_staged && one.owners == other.owners;
}

static std::string describe(const Descriptor& called) {
  static const char* kinds[] = {"float32", "float64", "float16", "bfloat16", "int32", "int64"};
  std::string numel = std::to_string(called.numel);
  auto kind = static_cast<size_t>(called.kind);
  std::string elements = numel + " elements of " + (kind < std::size(kinds) ? kinds[kind] : "an unknown kind");
  switch (called.operation) {
    case Operation::all_reduce:
      return "all_reduce of " + elements + " times " + std::to_string(called.scale) +
             (called.is_staged ? "" : " in memory from allocate()");
    case Operation::reduce_scatter:
      return "reduce_scatter of " + elements + " a rank";
    case Operation::broadcast:
      return "broadcast of " + numel + " bytes from rank " + std::to_string(called.source_rank);
    case Operation::all_gather:
      return "all_gather of " + numel + " bytes";
    case Operation::barrier:
      return "barrier";
    case Operation::sum_contributions:
      return "sum_contributions of " + elements + " each, whose owners have the digest " + std::to_string(called.owners);
  }
  return "an unknown operation";
}

// What this rank, or the first one that has arrived at the round, and another have called. The descriptions stay,
// because nobody enters the round that would use their place while this one is not finished by all.
std::string SharedMemoryGroup::describe_difference(uint64_t round) const {
  // Not by `arrived`, which is stored after the description: a rank that was seen to differ might not count as arrived.
  auto has_arrived = [&](size_t rank) {
    return descriptor(rank, round).round.load(std::memory_order_acquire) == round;
  };
  size_t one = rank_;
  for (size_t rank = 0; rank < world_size_ && !has_arrived(one); ++rank) one = rank;
  for (size_t other = 0; other < world_size_; ++other) {
    if (!has_arrived(other) || is_same(descriptor(one, round), descriptor(other, round))) continue;
    return "rank " + std::to_string(one) + " called " + describe(descriptor(one, round)) + ", rank " +
           std::to_string(other) + " called " + describe(descriptor(other, round));
  }
  return "";
}

// A rank that a broadcast does not wait for is compared if it is there. Of any two ranks at least one sees the other,
// because there is a fence (in notify) between a rank's own arrival and its look at the others'.
bool SharedMemoryGroup::check_agreement(const Call& call, uint64_t round) {
  const Descriptor& own = descriptor(rank_, round);
  for (size_t rank = 0; rank < world_size_; ++rank) {
    if (call.operation == Operation::broadcast && descriptor(rank, round).round.load(std::memory_order_acquire) != round)
      continue;
    if (is_same(own, descriptor(rank, round))) continue;
    fail(WaitStatus::mismatched, uint64_t{1} << rank, round);
    return false;
  }
  return true;
}

}  // namespace psengine

#endif  // __linux__
