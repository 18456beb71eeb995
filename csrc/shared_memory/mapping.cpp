#if defined(__linux__)

#include "shared_memory/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

namespace psengine {

std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

Mapping::Mapping(int file_descriptor, size_t bytes) : bytes_(bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_descriptor, 0);
  if (address == MAP_FAILED) throw system_error("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<char*>(address);
  madvise(data_, bytes, MADV_HUGEPAGE);  // where the machine offers it for shared memory
}

Mapping::Mapping(Mapping&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping map_path(const std::string& path, size_t bytes, const std::function<bool(const char*)>& is_ours) {
  int file_descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_descriptor < 0) throw system_error("cannot open a peer's shared memory " + path);
  struct stat status {};
  if (fstat(file_descriptor, &status) != 0 || static_cast<uint64_t>(status.st_size) != bytes) {
    ::close(file_descriptor);
    throw std::runtime_error(path + " is not a peer's shared memory (expected " + std::to_string(bytes) +
                             " bytes, got " + std::to_string(status.st_size) + ")");
  }
  Mapping mapping;
  try {
    mapping = Mapping(file_descriptor, bytes);
  } catch (...) {
    ::close(file_descriptor);
    throw;
  }
  ::close(file_descriptor);
  if (!is_ours(mapping.data())) throw std::runtime_error(path + " is not this group's shared memory");
  return mapping;
}

}  // namespace psengine

#endif  // __linux__
