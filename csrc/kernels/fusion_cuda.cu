// The fused passes on CUDA: one launch for as many tensors as fit into a kernel's arguments (see fusion_cuda.h).
//
// The bits are those of `convert` and `accumulate` in kernels.h, except for the payloads of NaNs. Products and sums are
// written as __fmul_rn and __fadd_rn (__dmul_rn, __dadd_rn), which the compiler never contracts; --use_fast_math must
// not be passed, because it flushes subnormals.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/fusion.h"
#include "kernels/fusion_cuda.h"

namespace psengine {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

template <Mode mode, typename Source>
__device__ __forceinline__ Tally write_chunk_to(ScalarKind destination_kind, const Work& work) {
  switch (destination_kind) {
    case ScalarKind::float32:
      return write_chunk<mode, Source, float>(work);
    case ScalarKind::float64:
      return write_chunk<mode, Source, double>(work);
    case ScalarKind::float16:
      return write_chunk<mode, Source, __half>(work);
    default:
      return write_chunk<mode, Source, __nv_bfloat16>(work);
  }
}

template <Mode mode>
__device__ __forceinline__ Tally write_item(const Item& item, ScalarKind source_kind, ScalarKind destination_kind,
                                            int64_t begin, uint32_t numel, const BatchHeader& header) {
  const char* source = header.to_flat ? item.tensor : item.flat;
  char* destination = header.to_flat ? item.flat : item.tensor;
  const Work work{source + begin * static_cast<int64_t>(floating_bytes(source_kind)),
                  destination + begin * static_cast<int64_t>(floating_bytes(destination_kind)), numel, header.scale};
  switch (source_kind) {
    case ScalarKind::float32:
      return write_chunk_to<mode, float>(destination_kind, work);
    case ScalarKind::float64:
      return write_chunk_to<mode, double>(destination_kind, work);
    case ScalarKind::float16:
      return write_chunk_to<mode, __half>(destination_kind, work);
    default:
      return write_chunk_to<mode, __nv_bfloat16>(destination_kind, work);
  }
}

// Strided tensors are rare and bound by their scattered accesses, so kinds are looked at for every element.
__device__ __forceinline__ double load_wide(const char* address, ScalarKind kind) {
  switch (kind) {
    case ScalarKind::float32:
      return *reinterpret_cast<const float*>(address);
    case ScalarKind::float64:
      return *reinterpret_cast<const double*>(address);
    case ScalarKind::float16:
      return to<double>(*reinterpret_cast<const __half*>(address));
    default:
      return to<double>(*reinterpret_cast<const __nv_bfloat16*>(address));
  }
}

template <Mode mode, typename WideValue>
__device__ __forceinline__ void store(char* address, ScalarKind kind, WideValue value, Tally& tally) {
  const auto write = [&](auto narrow) {
    *reinterpret_cast<decltype(narrow)*>(address) = narrow;
    if constexpr (mode == Mode::convert_and_count) tally.count(narrow);
  };
  switch (kind) {
    case ScalarKind::float32:
      return write(to<float>(value));
    case ScalarKind::float64:
      return write(to<double>(value));
    case ScalarKind::float16:
      return write(to<__half>(value));
    default:
      return write(to<__nv_bfloat16>(value));
  }
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
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ BatchType batch) {
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
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ BatchType batch) {
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

cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// A toolkit before 12.1 does not compile more than 4 KB of arguments.
#if CUDART_VERSION >= 12010
// As torch decides it for its own _foreach_ kernels.
bool takes_large_arguments(int32_t device_index) {
  int driver_version = 0;
  STD_CUDA_CHECK(cudaDriverGetVersion(&driver_version));
  int capability_major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&capability_major, cudaDevAttrComputeCapabilityMajor, device_index));
  return driver_version >= 12010 && capability_major >= 7;
}
#endif

// Fills batches and launches each that is full.
template <Mode mode, class BatchType>
class Launches {
 public:
  Launches(const BatchHeader& header, cudaStream_t stream) : stream_(stream) { batch_.header = header; }

  void add(const typename BatchType::item_type& item, uint32_t label, int64_t chunk_count) {
    if (!has_room(batch_, chunk_count)) flush();
    append(batch_, item, label, chunk_count);
  }

  void flush() {
    BatchHeader& header = batch_.header;
    if (header.chunk_count > 0) {
      write_kernel<mode, BatchType><<<header.chunk_count, kThreads, 0, stream_>>>(batch_);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if constexpr (mode == Mode::convert_and_count) {
      if (header.item_count > 0) {
        combine_kernel<BatchType><<<header.item_count, kThreads, 0, stream_>>>(batch_);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      }
      header.partial_counts += header.chunk_count;
    }
    header.item_count = 0;
    header.chunk_count = 0;
  }

  // Where the next batch's counts begin.
  int64_t* partial_counts() const { return batch_.header.partial_counts; }

 private:
  BatchType batch_;  // its unused items stay uninitialised
  cudaStream_t stream_;
};

int64_t chunk_count_of(int64_t numel, ScalarKind tensor_kind, ScalarKind flat_kind) {
  const int64_t whole = chunk_numel(floating_bytes(tensor_kind), floating_bytes(flat_kind));
  return numel / whole + (numel % whole != 0);
}

// A fusion with its strided tensors taken apart.
struct Plan {
  std::vector<size_t> dense;                            // indices of parts
  std::vector<std::pair<size_t, StridedItem>> strided;  // each with the index of its part
  int64_t chunk_count = 0;
};

// Throws std::runtime_error as check_fusion does: STD_TORCH_CHECK would put the source file in front of the message.
Plan plan_of(const Fusion& fusion) {
  if (fusion.parts.size() > kMaximumIndex) {
    throw std::runtime_error("too many tensors in one call (expected at most " + std::to_string(kMaximumIndex) +
                             ", got " + std::to_string(fusion.parts.size()) + ")");
  }
  Plan plan;
  plan.dense.reserve(fusion.parts.size());
  for (size_t index = 0; index < fusion.parts.size(); ++index) {
    const Part& part = fusion.parts[index];
    plan.chunk_count += chunk_count_of(part.numel, part.kind, fusion.flat_kind);
    const size_t dimensions = part.sizes.size();
    if (dimensions == 0 || part.numel == 0) {
      plan.dense.push_back(index);
      continue;
    }
    if (dimensions > kMaximumDimensions) {
      throw std::runtime_error("tensor " + std::to_string(index) +
                               " must have fewer dimensions on CUDA (expected at most " +
                               std::to_string(kMaximumDimensions) + " that no common stride merges, got " +
                               std::to_string(dimensions) + "); pass its contiguous()");
    }
    StridedItem item{};
    item.flat = fusion.flat + part.flat_offset * static_cast<int64_t>(floating_bytes(fusion.flat_kind));
    item.tensor = part.data;
    item.numel = part.numel;
    item.dimensions = static_cast<int64_t>(dimensions);
    for (size_t d = 0; d < dimensions; ++d) {
      item.sizes[d] = part.sizes[dimensions - 1 - d];
      item.strides[d] = part.strides[dimensions - 1 - d];
    }
    plan.strided.emplace_back(index, item);
  }
  return plan;
}

template <Mode mode, class BatchType>
void launch_dense(const Fusion& fusion, const Plan& plan, BatchHeader& header, cudaStream_t stream) {
  Launches<mode, BatchType> launches(header, stream);
  for (const size_t index : plan.dense) {
    const Part& part = fusion.parts[index];
    char* flat = fusion.flat + part.flat_offset * static_cast<int64_t>(floating_bytes(fusion.flat_kind));
    launches.add({flat, part.data, part.numel}, label_of(static_cast<uint32_t>(index), part.kind),
                 chunk_count_of(part.numel, part.kind, fusion.flat_kind));
  }
  launches.flush();
  header.partial_counts = launches.partial_counts();
}

template <Mode mode>
void launch_all(const Fusion& fusion, const Plan& plan, BatchHeader header, int32_t device_index) {
  const cudaStream_t stream = current_stream(device_index);
  const auto launch_dense_parts = [&] {
#if CUDART_VERSION >= 12010
    if (plan.dense.size() > SmallBatch::capacity && takes_large_arguments(device_index)) {
      return launch_dense<mode, LargeBatch>(fusion, plan, header, stream);
    }
#endif
    return launch_dense<mode, SmallBatch>(fusion, plan, header, stream);
  };
  launch_dense_parts();
  Launches<mode, StridedBatch> launches(header, stream);
  for (const auto& [index, item] : plan.strided) {
    const Part& part = fusion.parts[index];
    launches.add(item, label_of(static_cast<uint32_t>(index), part.kind),
                 chunk_count_of(part.numel, part.kind, fusion.flat_kind));
  }
  launches.flush();
}

BatchHeader header_of(const Fusion& fusion, Direction direction, double scale) {
  BatchHeader header{};
  header.scale = scale;
  header.flat_kind = fusion.flat_kind;
  header.to_flat = direction == Direction::pack;
  return header;
}

Tensor empty_on(const Tensor& like, int64_t numel, ScalarType type) {
  return torch::stable::empty(IntHeaderOnlyArrayRef(&numel, 1), type, std::nullopt, like.device());
}

void convert(const Tensor& flat, const std::vector<Tensor>& tensors, double scale, const std::optional<Tensor>& layout,
             Direction direction) {
  const Fusion fusion = check_fusion(flat, tensors, layout, direction);
  const Plan plan = plan_of(fusion);
  const int32_t device_index = flat.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  launch_all<Mode::convert>(fusion, plan, header_of(fusion, direction, scale), device_index);
}

Tensor convert_and_count(const Tensor& flat, const std::vector<Tensor>& tensors, double scale,
                         const std::optional<Tensor>& layout, Direction direction) {
  const Fusion fusion = check_fusion(flat, tensors, layout, direction);
  const Plan plan = plan_of(fusion);
  const int32_t device_index = flat.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  Tensor non_finite_counts = empty_on(flat, static_cast<int64_t>(tensors.size()), ScalarType::Long);
  // Freed on return, while kernels may still run: the allocator gives it out again only to later work on this stream.
  const Tensor partial_counts = empty_on(flat, plan.chunk_count, ScalarType::Long);
  BatchHeader header = header_of(fusion, direction, scale);
  header.partial_counts = static_cast<int64_t*>(partial_counts.mutable_data_ptr());
  header.non_finite_counts = static_cast<int64_t*>(non_finite_counts.mutable_data_ptr());
  launch_all<Mode::convert_and_count>(fusion, plan, header, device_index);
  return non_finite_counts;
}

// ---- ops

void pack_(const Tensor& flat, const std::vector<Tensor>& tensors, double scale, const std::optional<Tensor>& layout) {
  convert(flat, tensors, scale, layout, Direction::pack);
}

void unpack_(const std::vector<Tensor>& tensors, const Tensor& flat, double scale,
             const std::optional<Tensor>& layout) {
  convert(flat, tensors, scale, layout, Direction::unpack);
}

Tensor pack_counting_(const Tensor& flat, const std::vector<Tensor>& tensors, double scale,
                      const std::optional<Tensor>& layout) {
  return convert_and_count(flat, tensors, scale, layout, Direction::pack);
}

void accumulate_(const Tensor& destination, const Tensor& source, double scale) {
  const Accumulation accumulation = check_accumulation(destination, source);
  if (accumulation.numel == 0) return;
  const int32_t device_index = destination.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  // A pack of one tensor that adds.
  BatchHeader header{};
  header.scale = scale;
  header.flat_kind = accumulation.destination_kind;
  header.to_flat = true;
  Launches<Mode::accumulate, SingleBatch> launches(header, current_stream(device_index));
  launches.add({accumulation.destination, const_cast<char*>(accumulation.source), accumulation.numel},
               label_of(0, accumulation.source_kind),
               chunk_count_of(accumulation.numel, accumulation.source_kind, accumulation.destination_kind));
  launches.flush();
}

}  // namespace
}  // namespace psengine

STABLE_TORCH_LIBRARY_IMPL(psengine, CUDA, m) {
  m.impl("pack_", TORCH_BOX(&psengine::pack_));
  m.impl("unpack_", TORCH_BOX(&psengine::unpack_));
  m.impl("pack_counting_", TORCH_BOX(&psengine::pack_counting_));
  m.impl("accumulate_", TORCH_BOX(&psengine::accumulate_));
}
