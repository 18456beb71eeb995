// Launches of the CUDA kernels, on operands that were checked. Neither this nor the kernels need torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/operands.h"

namespace psengine {

// Blocks that write_fusion launches: as many numbers does it want for partial counts.
int64_t chunk_count(const Fusion& fusion);

// Pack or unpack. partial_counts and counts are memory of the device, or null: `counts` becomes for each part how many
// of the values written are not finite.
void write_fusion(const Fusion& fusion, Direction direction, double scale, int64_t* partial_counts, int64_t* counts,
                  cudaStream_t stream);

void accumulate(const Accumulation& accumulation, double scale, cudaStream_t stream);

void encode_blocks(const Encoding& encoding, cudaStream_t stream);

void decode_blocks(const Decoding& decoding, cudaStream_t stream);

// Run kernel(arguments...) in so many blocks.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks == 0) return;
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = dim3(static_cast<unsigned>(blocks));
  configuration.blockDim = dim3(static_cast<unsigned>(threads));
  configuration.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&configuration, kernel, arguments...);
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or torch's next check would find it again
  throw std::runtime_error(std::string("a CUDA kernel was not launched: ") + cudaGetErrorString(error));
}

}  // namespace psengine
