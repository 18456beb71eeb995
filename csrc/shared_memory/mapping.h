// Anonymous memory that processes share; psengine/collectives/shared_memory/files.py makes it.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>

namespace psengine {

// `what` and what errno says.
std::runtime_error system_error(const std::string& what);

// A mapping of this process.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int file_descriptor, size_t bytes);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Map a file that another process made; `is_ours` looks at its first page before anything else is believed.
Mapping map_path(const std::string& path, size_t bytes, const std::function<bool(const char*)>& is_ours);

}  // namespace psengine
