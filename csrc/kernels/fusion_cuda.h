// How a pass over many tensors is cut into the blocks of one CUDA launch. Nothing here needs a device.
//
//   tensors          |---- 0 ----|- 1 -|2|------- 3 -------|
//   chunks (blocks)  | 0 | 1 | 2 |3| 4 |5| 6 | 7 | 8 |  9  |
//   first_chunks       0           3    5 6                    found by bisection in the block
//
// A batch is the argument of one launch: addresses travel by value in the kernel's arguments, because a gradient has
// another address at every step and a copy of a table of addresses would have to be waited for or captured.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

#ifdef __CUDACC__
#define PSENGINE_HOST_DEVICE __host__ __device__
#else
#define PSENGINE_HOST_DEVICE
#endif

namespace psengine {

constexpr int kThreads = 256;        // of a block
constexpr int kPacksPerThread = 4;   // loaded before the first is stored; more: fewer blocks at a time on a processor
constexpr int kPackBytes = 16;       // the widest access there is
constexpr int kMaximumDimensions = 8;

// element_bytes() of the floating kinds, also for device code.
PSENGINE_HOST_DEVICE constexpr size_t floating_bytes(ScalarKind kind) {
  return kind == ScalarKind::float64 ? 8 : kind == ScalarKind::float32 ? 4 : 2;
}

// Elements that a thread moves with one access: 16 bytes of the wider kind, so that both sides stay coalesced.
PSENGINE_HOST_DEVICE constexpr int pack_numel(size_t source_bytes, size_t destination_bytes) {
  return kPackBytes / static_cast<int>(source_bytes > destination_bytes ? source_bytes : destination_bytes);
}

// Elements of a block's work: 4,096 where the wider kind is float32.
PSENGINE_HOST_DEVICE constexpr uint32_t chunk_numel(size_t source_bytes, size_t destination_bytes) {
  return kThreads * kPacksPerThread * static_cast<uint32_t>(pack_numel(source_bytes, destination_bytes));
}

// A tensor whose memory is in the order of its place in the flat tensor.
struct Item {
  char* flat;    // where its place begins
  char* tensor;  // its first element
  int64_t numel;
};

// Any other. Innermost dimension of the place first, and none of size 1.
struct StridedItem {
  char* flat;
  char* tensor;
  int64_t numel;
  int64_t dimensions;
  int64_t sizes[kMaximumDimensions];
  int64_t strides[kMaximumDimensions];  // elements
};

struct BatchHeader {
  double scale;
  int64_t* partial_counts;     // one for each chunk of the batch; null: nothing is counted
  int64_t* non_finite_counts;  // one for each tensor of the whole call
  ScalarKind flat_kind;
  bool to_flat;
  int32_t item_count;
  uint32_t chunk_count;
};

template <class ItemType, int item_capacity>
struct Batch {
  static constexpr int capacity = item_capacity;
  using item_type = ItemType;

  BatchHeader header;
  uint32_t first_chunks[capacity];
  uint32_t labels[capacity];  // index of the tensor in the call << 2 | its kind (the four floating kinds come first)
  ItemType items[capacity];
};

// Kernel arguments: 4 KB everywhere; 32,764 bytes since CUDA 12.1 from compute capability 7.0
// (https://developer.nvidia.com/blog/cuda-12-1-supports-large-kernel-parameters/).
using SmallBatch = Batch<Item, 126>;
using LargeBatch = Batch<Item, 1021>;
using StridedBatch = Batch<StridedItem, 22>;
using SingleBatch = Batch<Item, 1>;
static_assert(sizeof(SmallBatch) <= 4096 && sizeof(StridedBatch) <= 4096 && sizeof(LargeBatch) <= 32764);

constexpr uint32_t kMaximumIndex = UINT32_MAX >> 2;

PSENGINE_HOST_DEVICE constexpr uint32_t label_of(uint32_t index, ScalarKind kind) {
  return index << 2 | static_cast<uint32_t>(kind);
}
PSENGINE_HOST_DEVICE constexpr uint32_t index_of(uint32_t label) { return label >> 2; }
PSENGINE_HOST_DEVICE constexpr ScalarKind kind_of(uint32_t label) { return static_cast<ScalarKind>(label & 3); }

// The item to which a chunk belongs: the last one that begins at or before it. Items without chunks are never found.
PSENGINE_HOST_DEVICE inline int32_t find_item(const uint32_t* first_chunks, int32_t item_count, uint32_t chunk) {
  int32_t low = 0;
  int32_t high = item_count;  // first_chunks[low] <= chunk < first_chunks[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (first_chunks[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A chunk's elements: `head` one by one, `packs` packs, and the rest one by one again.
struct Split {
  uint32_t head;
  uint32_t packs;
};

// Packs must be aligned on both sides. Where no element is, all are head.
PSENGINE_HOST_DEVICE inline Split split_of(uintptr_t source, size_t source_bytes, uintptr_t destination,
                                           size_t destination_bytes, uint32_t numel) {
  const uint32_t pack = static_cast<uint32_t>(pack_numel(source_bytes, destination_bytes));
  const uint32_t source_lead = static_cast<uint32_t>(source / source_bytes) % pack;
  const uint32_t destination_lead = static_cast<uint32_t>(destination / destination_bytes) % pack;
  if (source_lead != destination_lead) return {numel, 0};
  const uint32_t head = (pack - source_lead) % pack;
  if (head >= numel) return {numel, 0};
  return {head, (numel - head) / pack};
}

// Where the tensor keeps the element that stands at `position` of its place, in elements from the first.
PSENGINE_HOST_DEVICE inline int64_t strided_offset(const StridedItem& item, int64_t position) {
  int64_t offset = 0;
  if (item.numel <= INT32_MAX) {  // dividing 64-bit numbers takes several times as long
    uint32_t rest = static_cast<uint32_t>(position);
    for (int64_t d = 0; d < item.dimensions; ++d) {
      const uint32_t size = static_cast<uint32_t>(item.sizes[d]);
      offset += static_cast<int64_t>(rest % size) * item.strides[d];
      rest /= size;
    }
  } else {
    for (int64_t d = 0; d < item.dimensions; ++d) {
      offset += position % item.sizes[d] * item.strides[d];
      position /= item.sizes[d];
    }
  }
  return offset;
}

// Add one tensor at the end.
template <class BatchType>
void append(BatchType& batch, const typename BatchType::item_type& item, uint32_t label, int64_t chunk_count) {
  BatchHeader& header = batch.header;
  batch.first_chunks[header.item_count] = header.chunk_count;
  batch.labels[header.item_count] = label;
  batch.items[header.item_count] = item;
  header.item_count += 1;
  header.chunk_count += static_cast<uint32_t>(chunk_count);
}

// A grid has at most 2^31 - 1 blocks.
template <class BatchType>
bool has_room(const BatchType& batch, int64_t chunk_count) {
  return batch.header.item_count < BatchType::capacity && batch.header.chunk_count + chunk_count <= INT32_MAX;
}

}  // namespace psengine
