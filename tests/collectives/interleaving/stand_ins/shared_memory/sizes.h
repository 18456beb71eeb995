// In place of csrc/shared_memory/sizes.h: places are used again in the second or third round, and chunks are two values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace psengine {

constexpr uint64_t kRingRounds = 2;
constexpr uint64_t kSlots = 2;
constexpr size_t kMaxSegments = 2;
constexpr size_t kChunkBytes = 16;
constexpr size_t kSmallBytes = 8;
extern int kYields;  // set by each scenario: 0 sleeps at once, more never sleeps

}  // namespace psengine
