// Memory for tensors that ranks map of each other.
#if defined(__linux__)

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "shared_memory/call.h"
#include "shared_memory/layout.h"

namespace psengine {

size_t SharedMemoryGroup::adopt_segment(int file_descriptor, size_t bytes, char* address) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  Segment* segments = region(rank_).segments;
  size_t index = 0;
  while (index < kMaxSegments && segments[index].id.load() != 0) ++index;
  if (index == kMaxSegments) throw std::runtime_error("more than 64 pieces of shared memory are in use on this rank");
  uint32_t id = ++last_segment_id_;
  *reinterpret_cast<SegmentHeader*>(address) = SegmentHeader{id, token_};
  own_segments_[index] = address;
  segments[index].file_descriptor.store(file_descriptor);
  segments[index].bytes.store(bytes);
  segments[index].id.store(id, std::memory_order_release);
  return index;
}

void SharedMemoryGroup::release_segment(size_t index) {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  own_segments_.at(index) = nullptr;
  region(rank_).segments[index].id.store(0);
  region(rank_).releases.fetch_add(1, std::memory_order_release);
}

// Give back the memory of segments whose owners have released them: nobody releases what an unfinished round needs.
void SharedMemoryGroup::drop_released_segments() {
  for (size_t rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    uint64_t releases = region(rank).releases.load(std::memory_order_acquire);
    if (releases == peer.releases) continue;
    peer.releases = releases;
    const Segment* segments = region(rank).segments;
    for (auto entry = peer.segments.begin(); entry != peer.segments.end();) {
      bool is_live =
          std::any_of(segments, segments + kMaxSegments, [&](const Segment& s) { return s.id == entry->first; });
      entry = is_live ? std::next(entry) : peer.segments.erase(entry);
    }
  }
}

const char* SharedMemoryGroup::own_segment_of(const char* data, size_t bytes, uint32_t* slot) const {
  for (size_t index = 0; index < kMaxSegments; ++index) {
    const char* begin = own_segments_[index];
    if (begin != nullptr && data >= begin + sizeof(SegmentHeader) &&
        data + bytes <= begin + region(rank_).segments[index].bytes.load()) {
      *slot = static_cast<uint32_t>(index);
      return begin;
    }
  }
  return nullptr;
}

Mapping& SharedMemoryGroup::peer_segment(size_t rank, uint32_t slot, uint32_t id) {
  auto& mapped = peers_[rank].segments;
  auto found = mapped.find(id);
  if (found != mapped.end()) return found->second;
  const Segment* segments = region(rank).segments;
  if (slot >= kMaxSegments || segments[slot].id.load(std::memory_order_acquire) != id)
    throw std::runtime_error("rank " + std::to_string(rank) + " named a piece of shared memory it does not have");
  std::string path = "/proc/" + std::to_string(region(rank).process_id.load()) + "/fd/" +
                     std::to_string(segments[slot].file_descriptor.load());
  Mapping mapping = map_path(path, segments[slot].bytes.load(), [&](const char* page) {
    const auto* header = reinterpret_cast<const SegmentHeader*>(page);
    return header->id == id && header->token == token_;
  });
  return mapped.emplace(id, std::move(mapping)).first->second;
}

// The round's piece of another rank's tensor that is reduced in place.
char* SharedMemoryGroup::peer_data(size_t rank, const Call& call, uint64_t round) {
  const Descriptor& description = descriptor(rank, round);
  Mapping& mapping = peer_segment(rank, description.segment_slot, description.segment_id);
  uint64_t bytes = call.bytes_of(rank);
  if (description.offset_bytes < sizeof(SegmentHeader) || description.offset_bytes > mapping.bytes() ||
      bytes > mapping.bytes() - description.offset_bytes)
    throw std::runtime_error("rank " + std::to_string(rank) + " named memory outside its piece");
  return mapping.data() + description.offset_bytes;
}

}  // namespace psengine

#endif  // __linux__
