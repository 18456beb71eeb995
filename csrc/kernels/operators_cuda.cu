// The operators on CUDA: what is torch's of them. Each launches on the current stream of its tensors' device.
#include <cuda_runtime.h>

#include <optional>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/checks.h"
#include "kernels/cuda.h"

namespace psengine {
namespace {

using Tensors = std::vector<Tensor>;

// Makes the tensor's device the current one.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

Tensor new_counts(const Tensor& flat, int64_t numel) {
  return torch::stable::new_empty(flat, {numel}, torch::headeronly::ScalarType::Long);
}

void pack_(const Tensor& flat, const Tensors& tensors, double scale, const OptionalTensor& layout) {
  const Fusion fusion = check_fusion(flat, tensors, layout, Direction::pack);
  write_fusion(fusion, Direction::pack, scale, nullptr, nullptr, OnDevice(flat).stream());
}

void unpack_(const Tensors& tensors, const Tensor& flat, double scale, const OptionalTensor& layout) {
  const Fusion fusion = check_fusion(flat, tensors, layout, Direction::unpack);
  write_fusion(fusion, Direction::unpack, scale, nullptr, nullptr, OnDevice(flat).stream());
}

Tensor pack_counting_(const Tensor& flat, const Tensors& tensors, double scale, const OptionalTensor& layout) {
  const Fusion fusion = check_fusion(flat, tensors, layout, Direction::pack);
  const OnDevice device(flat);
  Tensor counts = new_counts(flat, static_cast<int64_t>(tensors.size()));
  // Freed on return, while kernels may still run: the allocator gives it out again only to later work on this stream.
  const Tensor partial_counts = new_counts(flat, chunk_count(fusion));
  write_fusion(fusion, Direction::pack, scale, static_cast<int64_t*>(partial_counts.mutable_data_ptr()),
               static_cast<int64_t*>(counts.mutable_data_ptr()), device.stream());
  return counts;
}

void accumulate_(const Tensor& destination, const Tensor& source, double scale) {
  const Accumulation accumulation = check_accumulation(destination, source);
  accumulate(accumulation, scale, OnDevice(destination).stream());
}

void encode_blocks_(const Tensor& payload, const Tensor& values, const OptionalTensor& residual,
                    const OptionalTensor& next, int64_t format) {
  const Encoding encoding = check_encoding(payload, values, residual, next, format);
  encode_blocks(encoding, OnDevice(values).stream());
}

void decode_blocks_(const Tensor& into, const Tensor& payload, int64_t format, bool adds) {
  const Decoding decoding = check_decoding(into, payload, format, adds);
  decode_blocks(decoding, OnDevice(into).stream());
}

}  // namespace
}  // namespace psengine

STABLE_TORCH_LIBRARY_IMPL(psengine, CUDA, m) {
  m.impl("pack_", TORCH_BOX(&psengine::pack_));
  m.impl("unpack_", TORCH_BOX(&psengine::unpack_));
  m.impl("pack_counting_", TORCH_BOX(&psengine::pack_counting_));
  m.impl("accumulate_", TORCH_BOX(&psengine::accumulate_));
  m.impl("encode_blocks_", TORCH_BOX(&psengine::encode_blocks_));
  m.impl("decode_blocks_", TORCH_BOX(&psengine::decode_blocks_));
}
