// How long a wait spins before it sleeps: as long as being woken up takes, which each sleep measures.
//
// A wait that ends sooner is cheaper spun than slept; one that lasts longer has then wasted as much again at most. Where
// waits last longer, such as at the end of a backward whose ranks are uneven, each halves the next ones' spinning.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace psengine {

// CLOCK_MONOTONIC, which all processes of a host share.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class SpinLength {
 public:
  int64_t ns() const { return spin_ns_; }

  // What was waited for happened after `waited_ns`.
  void note_wait(int64_t waited_ns) { spin_ns_ = waited_ns <= wake_up_ns_ ? wake_up_ns_ : spin_ns_ / 2; }

  // It took `ns` from a notification until the sleeper ran. Longer ones say how busy the core is, not what a wake-up
  // costs.
  void note_wake_up(int64_t ns) { wake_up_ns_ += (std::clamp(ns, kShortestNs, kLongestNs) - wake_up_ns_) / 8; }

 private:
  static constexpr int64_t kShortestNs = 5'000, kLongestNs = 200'000;

  int64_t wake_up_ns_ = 50'000;  // until it is measured
  int64_t spin_ns_ = wake_up_ns_;
};

}  // namespace psengine
