// The fused passes on CUDA: one launch for as many tensors as fit into a kernel's arguments.
//
//   tensors          |---- 0 ----|- 1 -|2|------- 3 -------|
//   chunks (blocks)  | 0 | 1 | 2 |3| 4 |5| 6 | 7 | 8 |  9  |
//   first_chunks       0           3    5 6                    found by bisection in the block
//
// A batch is the argument of one launch: addresses travel by value in the kernel's arguments, because a gradient has
// another address at every step and a copy of a table of addresses would have to be waited for or captured.
//
// The bits are those of `convert` and `accumulate` in kernels.h, except for the payloads of NaNs. Products and sums are
// written as __fmul_rn and __fadd_rn (__dmul_rn, __dadd_rn), which the compiler never contracts; --use_fast_math must
// not be passed, because it flushes subnormals.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda.h"

namespace psengine {
namespace {

// ---- one launch's work

constexpr int kThreads = 256;        // of a block
constexpr int kPacksPerThread = 4;   // loaded before the first is stored; more: fewer blocks at a time on a processor
constexpr int kPackBytes = 16;       // the widest access there is
constexpr int kMaximumDimensions = 8;

// element_bytes() of the floating kinds, also for device code.
__host__ __device__ constexpr size_t floating_bytes(ScalarKind kind) {
  return kind == ScalarKind::float64 ? 8 : kind == ScalarKind::float32 ? 4 : 2;
}

// Elements that a thread moves with one access: 16 bytes of the wider kind, so that both sides stay coalesced.
__host__ __device__ constexpr int pack_numel(size_t source_bytes, size_t destination_bytes) {
  return kPackBytes / static_cast<int>(source_bytes > destination_bytes ? source_bytes : destination_bytes);
}

// Elements of a block's work: 4,096 where the wider kind is float32.
__host__ __device__ constexpr uint32_t chunk_numel(size_t source_bytes, size_t destination_bytes) {
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
  int64_t* partial_counts;     // one for each chunk of the batch; the next batch, later on the stream, uses them again
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

// Kernel arguments are copied at each launch, so a few tensors take a small batch. The most is 32,764 bytes since CUDA
// 12.1 (https://developer.nvidia.com/blog/cuda-12-1-supports-large-kernel-parameters/).
using SmallBatch = Batch<Item, 126>;
using LargeBatch = Batch<Item, 1021>;
using StridedBatch = Batch<StridedItem, 22>;
static_assert(sizeof(LargeBatch) <= 32764 && sizeof(StridedBatch) <= 4096);

__host__ __device__ constexpr uint32_t label_of(uint32_t index, ScalarKind kind) {
  return index << 2 | static_cast<uint32_t>(kind);
}
__host__ __device__ constexpr uint32_t index_of(uint32_t label) { return label >> 2; }
__host__ __device__ constexpr ScalarKind kind_of(uint32_t label) { return static_cast<ScalarKind>(label & 3); }

// The item to which a chunk belongs: the last one that begins at or before it. Items without chunks are never found.
__host__ __device__ inline int32_t find_item(const uint32_t* first_chunks, int32_t item_count, uint32_t chunk) {
  int32_t low = 0;
  int32_t high = item_count;  // first_chunks[low] <= chunk < first_chunks[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (first_chunks[middle] <= chunk ? low : high) = middle;
  }
  return low;
}

// A chunk's elements: `head` one by one, `packs` packs, and the rest one by one again.
struct Split {
  uint32_t head;
  uint32_t packs;
};

// Packs must be aligned on both sides. Where no element is, all are head.
__host__ __device__ inline Split split_of(uintptr_t source, size_t source_bytes, uintptr_t destination,
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
__device__ inline int64_t strided_offset(const StridedItem& item, int64_t position) {
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

enum class Mode { convert, convert_and_count, accumulate };

// ---- arithmetic

template <typename To>
__device__ __forceinline__ To to(float value) {
  if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// To 16 bits through float32, as torch's casts and the CPU's kernels go.
template <typename To>
__device__ __forceinline__ To to(double value) {
  if constexpr (std::is_same_v<To, double>) {
    return value;
  } else {
    return to<To>(__double2float_rn(value));
  }
}

template <typename To>
__device__ __forceinline__ To to(__half value) {
  return static_cast<To>(__half2float(value));
}

template <typename To>
__device__ __forceinline__ To to(__nv_bfloat16 value) {
  return static_cast<To>(__bfloat162float(value));
}

__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

template <typename Source, typename Destination>
using Wide = std::conditional_t<std::is_same_v<Source, double> || std::is_same_v<Destination, double>, double, float>;

// What one thread saw of the values it wrote.
struct Tally {
  uint32_t non_finite_count = 0;

  template <typename Value>
  __device__ __forceinline__ void count(Value value) {
    non_finite_count += !isfinite(to<Wide<Value, Value>>(value));
  }
};

// ---- one block's chunk

template <typename Value, int numel>
struct alignas(sizeof(Value) * numel) Pack {
  Value values[numel];
};

// Write `pack_count` packs, which the two functions find in memory by their number. A thread loads all of its packs of
// a round before it stores the first: memory answers late, and many requests at a time are what fills the bus.
template <Mode mode, int numel, typename Source, typename Destination, class SourceAt, class DestinationAt>
__device__ __forceinline__ void write_packs(uint32_t pack_count, const Source* source, SourceAt source_at,
                                            Destination* destination, DestinationAt destination_at, double scale,
                                            Tally& tally) {
  using WideValue = Wide<Source, Destination>;
  const WideValue factor = static_cast<WideValue>(scale);
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < pack_count; first += kThreads * kPacksPerThread) {
    Pack<Source, numel> loaded[kPacksPerThread];
    Pack<Destination, numel> written[kPacksPerThread];
#pragma unroll
    for (int p = 0; p < kPacksPerThread; ++p) {
      const uint32_t number = first + p * kThreads;
      if (number < pack_count) {
        loaded[p] = *reinterpret_cast<const Pack<Source, numel>*>(source + source_at(number));
        if constexpr (mode == Mode::accumulate) {
          written[p] = *reinterpret_cast<const Pack<Destination, numel>*>(destination + destination_at(number));
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPacksPerThread; ++p) {
      const uint32_t number = first + p * kThreads;
      if (number < pack_count) {
#pragma unroll
        for (int i = 0; i < numel; ++i) {
          WideValue value = multiply(to<WideValue>(loaded[p].values[i]), factor);
          if constexpr (mode == Mode::accumulate) value = add(to<WideValue>(written[p].values[i]), value);
          written[p].values[i] = to<Destination>(value);
          if constexpr (mode == Mode::convert_and_count) tally.count(written[p].values[i]);
        }
        *reinterpret_cast<Pack<Destination, numel>*>(destination + destination_at(number)) = written[p];
      }
    }
  }
}

// What write_chunk needs to know; by value, as it travels in registers.
struct Work {
  const char* source;
  char* destination;
  uint32_t numel;
  double scale;
};

// Never inlined: the kernels share one copy, and ptxas takes far longer over one large function than over many small.
template <Mode mode, typename Source, typename Destination>
__device__ __noinline__ Tally write_chunk(Work work) {
  constexpr int pack = pack_numel(sizeof(Source), sizeof(Destination));
  const Source* source = reinterpret_cast<const Source*>(work.source);
  Destination* destination = reinterpret_cast<Destination*>(work.destination);
  __builtin_assume(__isGlobal(source));  // lost in the call otherwise
  __builtin_assume(__isGlobal(destination));
  const Split split = split_of(reinterpret_cast<uintptr_t>(source), sizeof(Source),
                               reinterpret_cast<uintptr_t>(destination), sizeof(Destination), work.numel);
  const auto pack_at = [=](uint32_t number) { return split.head + number * pack; };
  const auto single_at = [=](uint32_t number) {  // around the packs
    return number < split.head ? number : number + split.packs * pack;
  };
  Tally tally;
  write_packs<mode, pack>(split.packs, source, pack_at, destination, pack_at, work.scale, tally);
  write_packs<mode, 1>(work.numel - split.packs * pack, source, single_at, destination, single_at, work.scale, tally);
  return tally;
}

// visit(a value of the kind).
template <class Visit>
__device__ __forceinline__ auto with_kind(ScalarKind kind, const Visit& visit) {
  switch (kind) {
    case ScalarKind::float32:
      return visit(float());
    case ScalarKind::float64:
      return visit(double());
    case ScalarKind::float16:
      return visit(__half());
    default:
      return visit(__nv_bfloat16());
  }
}

template <Mode mode>
__device__ __forceinline__ Tally write_item(const Item& item, ScalarKind source_kind, ScalarKind destination_kind,
                                            int64_t begin, uint32_t numel, const BatchHeader& header) {
  const char* source = header.to_flat ? item.tensor : item.flat;
  char* destination = header.to_flat ? item.flat : item.tensor;
  const Work work{source + begin * static_cast<int64_t>(floating_bytes(source_kind)),
                  destination + begin * static_cast<int64_t>(floating_bytes(destination_kind)), numel, header.scale};
  return with_kind(source_kind, [&](auto from) {
    return with_kind(destination_kind, [&](auto to) { return write_chunk<mode, decltype(from), decltype(to)>(work); });
  });
}

// Strided tensors are rare and bound by their scattered accesses, so kinds are looked at for every element.
__device__ __forceinline__ double load_wide(const char* address, ScalarKind kind) {
  return with_kind(kind, [&](auto of) { return to<double>(*reinterpret_cast<const decltype(of)*>(address)); });
}

template <Mode mode, typename WideValue>
__device__ __forceinline__ void store(char* address, ScalarKind kind, WideValue value, Tally& tally) {
  with_kind(kind, [&](auto of) {
    const auto narrow = to<decltype(of)>(value);
    *reinterpret_cast<decltype(of)*>(address) = narrow;
    if constexpr (mode == Mode::convert_and_count) tally.count(narrow);
  });
}

template <Mode mode>
__device__ __forceinline__ Tally write_item(const StridedItem& item, ScalarKind source_kind,
                                            ScalarKind destination_kind, int64_t begin, uint32_t numel,
                                            const BatchHeader& header) {
  static_assert(mode != Mode::accumulate);
  const bool in_double = source_kind == ScalarKind::float64 || destination_kind == ScalarKind::float64;
  const int64_t source_bytes = static_cast<int64_t>(floating_bytes(source_kind));
  const int64_t destination_bytes = static_cast<int64_t>(floating_bytes(destination_kind));
  Tally tally;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < numel; i += kThreads) {
    const int64_t flat_at = begin + i;
    const int64_t tensor_at = strided_offset(item, flat_at);
    const char* source = header.to_flat ? item.tensor + tensor_at * source_bytes : item.flat + flat_at * source_bytes;
    char* destination = header.to_flat ? item.flat + flat_at * destination_bytes
                                       : item.tensor + tensor_at * destination_bytes;
    const double value = load_wide(source, source_kind);  // exact, also where it goes on as float32
    if (in_double) {
      store<mode>(destination, destination_kind, multiply(value, header.scale), tally);
    } else {
      const float product = multiply(static_cast<float>(value), static_cast<float>(header.scale));
      store<mode>(destination, destination_kind, product, tally);
    }
  }
  return tally;
}

// ---- kernels

// The sum over the block, in thread 0.
template <typename Count>
__device__ __forceinline__ Count sum_of_block(Count count) {
  constexpr int warps = kThreads / 32;
  __shared__ Count counts[warps];
  for (int distance = 16; distance > 0; distance /= 2) count += __shfl_down_sync(0xffffffffu, count, distance);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
  __syncthreads();
  Count sum = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < warps; ++warp) sum += counts[warp];
  }
  return sum;
}

// One block a chunk.
template <Mode mode, class BatchType>
__global__ void __launch_bounds__(kThreads) write_kernel(const BatchType __grid_constant__ batch) {
  const BatchHeader& header = batch.header;
  const uint32_t chunk = blockIdx.x;
  const int32_t number = find_item(batch.first_chunks, header.item_count, chunk);
  const auto& item = batch.items[number];
  const ScalarKind tensor_kind = kind_of(batch.labels[number]);
  const uint32_t whole = chunk_numel(floating_bytes(tensor_kind), floating_bytes(header.flat_kind));
  const int64_t begin = static_cast<int64_t>(chunk - batch.first_chunks[number]) * whole;
  const uint32_t numel = item.numel - begin < whole ? static_cast<uint32_t>(item.numel - begin) : whole;
  const ScalarKind source_kind = header.to_flat ? tensor_kind : header.flat_kind;
  const ScalarKind destination_kind = header.to_flat ? header.flat_kind : tensor_kind;
  const Tally tally = write_item<mode>(item, source_kind, destination_kind, begin, numel, header);
  if constexpr (mode == Mode::convert_and_count) {
    const uint32_t sum = sum_of_block(tally.non_finite_count);
    if (threadIdx.x == 0) header.partial_counts[chunk] = sum;
  }
}

// One block a tensor: the sum of its chunks' counts.
template <class BatchType>
__global__ void __launch_bounds__(kThreads) combine_kernel(const BatchType __grid_constant__ batch) {
  const BatchHeader& header = batch.header;
  const int32_t number = static_cast<int32_t>(blockIdx.x);
  const uint32_t end = number + 1 < header.item_count ? batch.first_chunks[number + 1] : header.chunk_count;
  unsigned long long count = 0;
  for (uint32_t chunk = batch.first_chunks[number] + threadIdx.x; chunk < end; chunk += kThreads) {
    count += static_cast<unsigned long long>(header.partial_counts[chunk]);
  }
  const unsigned long long sum = sum_of_block(count);
  if (threadIdx.x == 0) header.non_finite_counts[index_of(batch.labels[number])] = static_cast<int64_t>(sum);
}

// ---- launches

int64_t chunk_count_of(int64_t numel, ScalarKind tensor_kind, ScalarKind flat_kind) {
  const int64_t whole = chunk_numel(floating_bytes(tensor_kind), floating_bytes(flat_kind));
  return numel / whole + (numel % whole != 0);
}

// Fills batches and launches each that is full.
template <Mode mode, class BatchType>
class Launches {
 public:
  Launches(const BatchHeader& header, cudaStream_t stream) : stream_(stream) { batch_.header = header; }

  void add(const typename BatchType::item_type& item, uint32_t index, ScalarKind kind) {
    BatchHeader& header = batch_.header;
    const int64_t chunks = chunk_count_of(item.numel, kind, header.flat_kind);
    // A grid has at most 2^31 - 1 blocks.
    if (header.item_count == BatchType::capacity || header.chunk_count + chunks > INT32_MAX) flush();
    batch_.first_chunks[header.item_count] = header.chunk_count;
    batch_.labels[header.item_count] = label_of(index, kind);
    batch_.items[header.item_count] = item;
    header.item_count += 1;
    header.chunk_count += static_cast<uint32_t>(chunks);
  }

  void flush() {
    BatchHeader& header = batch_.header;
    launch(write_kernel<mode, BatchType>, header.chunk_count, kThreads, stream_, batch_);
    if constexpr (mode == Mode::convert_and_count)
      launch(combine_kernel<BatchType>, header.item_count, kThreads, stream_, batch_);
    header.item_count = 0;
    header.chunk_count = 0;
  }

 private:
  BatchType batch_;  // its unused items stay uninitialised
  cudaStream_t stream_;
};

bool is_dense(const Part& part) { return part.sizes.empty() || part.numel == 0; }

StridedItem strided_item(const Fusion& fusion, size_t index) {
  const Part& part = fusion.parts[index];
  const size_t dimensions = part.sizes.size();
  // Thrown as checks.cpp throws.
  if (dimensions > kMaximumDimensions)
    throw std::runtime_error("tensor " + std::to_string(index) + " must have fewer dimensions on CUDA (expected at most " +
                             std::to_string(kMaximumDimensions) + " that no common stride merges, got " +
                             std::to_string(dimensions) + "); pass its contiguous()");
  StridedItem item{};
  item.flat = fusion.place_of(part);
  item.tensor = part.data;
  item.numel = part.numel;
  item.dimensions = static_cast<int64_t>(dimensions);
  for (size_t d = 0; d < dimensions; ++d) {
    item.sizes[d] = part.sizes[dimensions - 1 - d];
    item.strides[d] = part.strides[dimensions - 1 - d];
  }
  return item;
}

template <Mode mode, class DenseBatch>
void write_parts(const Fusion& fusion, const BatchHeader& header, cudaStream_t stream) {
  Launches<mode, DenseBatch> dense(header, stream);
  for (size_t i = 0; i < fusion.parts.size(); ++i) {
    const Part& part = fusion.parts[i];
    if (is_dense(part)) dense.add({fusion.place_of(part), part.data, part.numel}, static_cast<uint32_t>(i), part.kind);
  }
  dense.flush();
  Launches<mode, StridedBatch> strided(header, stream);
  for (size_t i = 0; i < fusion.parts.size(); ++i) {
    const Part& part = fusion.parts[i];
    if (!is_dense(part)) strided.add(strided_item(fusion, i), static_cast<uint32_t>(i), part.kind);
  }
  strided.flush();
}

template <Mode mode>
void write_all(const Fusion& fusion, const BatchHeader& header, cudaStream_t stream) {
  if (fusion.parts.size() > SmallBatch::capacity) return write_parts<mode, LargeBatch>(fusion, header, stream);
  write_parts<mode, SmallBatch>(fusion, header, stream);
}

}  // namespace

int64_t chunk_count(const Fusion& fusion) {
  int64_t count = 0;
  for (const Part& part : fusion.parts) count += chunk_count_of(part.numel, part.kind, fusion.flat_kind);
  return count;
}

void write_fusion(const Fusion& fusion, Direction direction, double scale, int64_t* partial_counts, int64_t* counts,
                  cudaStream_t stream) {
  BatchHeader header{};
  header.scale = scale;
  header.partial_counts = partial_counts;
  header.non_finite_counts = counts;
  header.flat_kind = fusion.flat_kind;
  header.to_flat = direction == Direction::pack;
  if (counts != nullptr) return write_all<Mode::convert_and_count>(fusion, header, stream);
  write_all<Mode::convert>(fusion, header, stream);
}

void accumulate(const Accumulation& accumulation, double scale, cudaStream_t stream) {
  // A pack of one tensor that adds.
  BatchHeader header{};
  header.scale = scale;
  header.flat_kind = accumulation.destination_kind;
  header.to_flat = true;
  Launches<Mode::accumulate, SmallBatch> launches(header, stream);
  launches.add({accumulation.destination, const_cast<char*>(accumulation.source), accumulation.numel}, 0,
               accumulation.source_kind);
  launches.flush();
}

}  // namespace psengine
