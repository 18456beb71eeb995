// Anonymous memory that processes share.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>

namespace psengine {

// `what` and what errno says.
std::runtime_error system_error(const std::string& what);

// Anonymous memory that goes when its last user goes, whatever becomes of the processes, and does not count against
// the size of /dev/shm. Sealed: a peer that shrank it would make our reads of it fatal.
int create_anonymous_file(const char* name, size_t bytes);

// Fix the size of an anonymous file for good; its content may still change.
void seal_size(int file_descriptor);

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
