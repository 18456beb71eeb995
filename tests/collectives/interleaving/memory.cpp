#include "memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace check {

constexpr size_t kGranuleBytes = 8;  // of plain accesses

static uint64_t bits_at(uintptr_t address, size_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, reinterpret_cast<const void*>(address), bytes);
  return bits;
}

void Memory::watch(uintptr_t begin, size_t bytes) {
  begin_ = begin;
  bytes_ = bytes;
  words_.clear();
  indices_.clear();
  accesses_.assign(bytes / kGranuleBytes + 1, {});
  accessed_.clear();
}

void Memory::start(size_t threads) {
  thread_count_ = threads;
  for (Word& word : words_) {
    word.values.clear();
    word.values.push_back({bits_at(word.address, word.bytes), View{}});
  }
  for (size_t thread = 0; thread < threads; ++thread) {
    threads_[thread] = ThreadViews{};
    threads_[thread].current.clock[thread] = 1;  // the epoch under way
  }
  fenced_ = View{};
  for (uint32_t granule : accessed_) accesses_[granule] = Access{};
  accessed_.clear();
}

size_t Memory::word_at(uintptr_t address, size_t bytes) {
  auto found = indices_.find(address);
  if (found != indices_.end()) return found->second;
  if (words_.size() == kMaxWords) {
    std::fprintf(stderr, "more than %zu atomic words: raise kMaxWords\n", kMaxWords);
    std::exit(2);
  }
  Word word;
  word.address = address;
  word.bytes = static_cast<uint32_t>(bytes);
  word.values.push_back({bits_at(address, bytes), View{}});
  words_.push_back(std::move(word));
  indices_[address] = words_.size() - 1;
  return words_.size() - 1;
}

uint64_t Memory::read(size_t thread, size_t index, size_t number, int order) {
  const Value& value = words_[index].values[number];
  ThreadViews& views = threads_[thread];
  auto seen = static_cast<uint16_t>(number);
  views.current.seen[index] = std::max(views.current.seen[index], seen);
  views.acquired.seen[index] = std::max(views.acquired.seen[index], seen);
  views.acquired.join(value.view);
  if (acquires(order)) views.current.join(value.view);
  return value.bits;
}

// A sequentially consistent access is held to what release and acquire promise: ARM keeps more.
void Memory::store(size_t thread, size_t index, uint64_t bits, int order, bool is_read_modify_write) {
  Word& word = words_[index];
  if ((word.writers & (1u << thread)) == 0) {
    word.writers |= 1u << thread;
    has_new_writer = true;
  }
  ThreadViews& views = threads_[thread];
  auto number = static_cast<uint16_t>(word.values.size());
  views.current.seen[index] = views.acquired.seen[index] = number;
  Value value{bits, releases(order) ? views.current : views.released};
  value.view.seen[index] = number;
  // A release sequence goes on through read-modify-writes.
  if (is_read_modify_write) value.view.join(word.values.back().view);
  word.values.push_back(value);
  ++views.current.clock[thread];  // what comes now is not covered by what was stored
}

void Memory::fence(size_t thread) {
  ThreadViews& views = threads_[thread];
  views.current.join(views.acquired);
  views.current.join_seen(fenced_);
  fenced_.join_seen(views.current);
  views.acquired.join(views.current);
  views.released = views.current;
  ++views.current.clock[thread];
}

std::string Memory::plain(size_t thread, uintptr_t address, size_t bytes, bool is_write) {
  const View& view = threads_[thread].current;
  for (size_t granule = (address - begin_) / kGranuleBytes; granule <= (address + bytes - 1 - begin_) / kGranuleBytes;
       ++granule) {
    Access& access = accesses_[granule];
    if (!access.is_used) {
      access.is_used = true;
      accessed_.push_back(static_cast<uint32_t>(granule));
    }
    if (access.writer != 0 && access.writer != thread + 1 && view.clock[access.writer - 1] < access.written)
      return std::string("a plain ") + (is_write ? "write" : "read") + " is not ordered after thread " +
             std::to_string(access.writer - 1) + "'s write";
    if (is_write) {
      for (size_t other = 0; other < thread_count_; ++other)
        if (other != thread && access.read[other] > view.clock[other])
          return "a plain write is not ordered after thread " + std::to_string(other) + "'s read";
      access.writer = static_cast<uint8_t>(thread + 1);
      access.written = view.clock[thread];
    } else {
      access.read[thread] = view.clock[thread];
    }
  }
  return "";
}

uint16_t Memory::oldest(size_t index, uint32_t live) const {
  uint16_t oldest = UINT16_MAX;
  for (size_t thread = 0; thread < thread_count_; ++thread)
    if (live >> thread & 1) oldest = std::min(oldest, threads_[thread].current.seen[index]);
  return oldest;
}

// Views and clocks relative to what every live thread knows: what lies behind that is no part of the state.
uint64_t Memory::hash(uint32_t live) const {
  View known;
  known.seen.fill(UINT16_MAX);
  known.clock.fill(UINT16_MAX);
  for (size_t thread = 0; thread < thread_count_; ++thread) {
    if ((live >> thread & 1) == 0) continue;
    const View& view = threads_[thread].current;
    for (size_t i = 0; i < kMaxWords; ++i) known.seen[i] = std::min(known.seen[i], view.seen[i]);
    for (size_t i = 0; i < kMaxThreads; ++i) known.clock[i] = std::min(known.clock[i], view.clock[i]);
  }
  uint64_t hash = live;
  auto add_view = [&](const View& view) {
    View relative;
    for (size_t i = 0; i < kMaxWords; ++i)
      relative.seen[i] = static_cast<uint16_t>(std::max(view.seen[i], known.seen[i]) - known.seen[i]);
    for (size_t i = 0; i < kMaxThreads; ++i)
      relative.clock[i] = static_cast<uint16_t>(std::max(view.clock[i], known.clock[i]) - known.clock[i]);
    static_assert(sizeof(View) % 8 == 0);
    std::array<uint64_t, sizeof(View) / 8> parts;
    std::memcpy(parts.data(), &relative, sizeof(View));
    for (uint64_t part : parts) hash = mixed(hash, part);
  };
  for (size_t thread = 0; thread < thread_count_; ++thread) {
    if ((live >> thread & 1) == 0) continue;
    add_view(threads_[thread].current);
    add_view(threads_[thread].acquired);
    add_view(threads_[thread].released);
  }
  View fenced = fenced_;
  add_view(fenced);
  for (size_t index = 0; index < words_.size(); ++index) {
    const auto& values = words_[index].values;
    for (size_t number = std::min<size_t>(known.seen[index], values.size() - 1); number < values.size(); ++number) {
      hash = mixed(hash, (index << 32) + number - known.seen[index]);
      hash = mixed(hash, values[number].bits);
      if (values.size() > 1) add_view(values[number].view);
    }
  }
  // Which granules were used first is no part of the state, so they are added up.
  uint64_t plain = 0;
  for (uint32_t granule : accessed_) {
    const Access& access = accesses_[granule];
    uint64_t part = mixed(granule, bits_at(begin_ + granule * kGranuleBytes, kGranuleBytes));
    if (access.writer != 0 && access.written > known.clock[access.writer - 1])
      part = mixed(part, access.writer * 65536u + access.written - known.clock[access.writer - 1]);
    for (size_t thread = 0; thread < thread_count_; ++thread)
      if (access.read[thread] > known.clock[thread])
        part = mixed(part, (thread << 20) + access.read[thread] - known.clock[thread]);
    plain += part;
  }
  return mixed(hash, plain);
}

}  // namespace check
