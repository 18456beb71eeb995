// An all-reduce (and broadcast, all-gather, reduce-scatter, barrier) between processes of one host, at memory speed.
//
// Every rank maps one control block: counters, descriptions of what each rank has called, and staging slots. Operations
// are cut into numbered rounds, the same on every rank, and each rank moves through them with three cursors:
//
//   enter   describe the round (and copy a piece into this rank's staging slot)            -> arrived = round
//   reduce  once everybody arrived: claim chunks of the round and sum them                 -> done += 1 a chunk
//   finish  once every chunk is done: copy the piece out                                   -> finished = round
//
// Nothing here has a thread of its own: cursors move whenever a rank begins or waits for an operation. Because chunks
// are claimed, whoever waits does the summing, and a rank that still computes holds nobody up once it has arrived.
//
// Tensors in memory that ranks adopted (adopt_segment) are reduced in place, in everybody's memory at once; others pass
// through staging slots, in pieces that stay in the cache. Small ones pass through a slot and are summed by every rank
// for itself, which saves a round trip. Values are added in the order of gloo's ring (ring.h), or in that of ranks, so
// sums have the same bits on every rank whoever computes them. Contributions (sum_contributions) are added in place too.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "shared_memory/mapping.h"
#include "shared_memory/ring.h"
#include "shared_memory/spin_length.h"

namespace psengine {

constexpr size_t kMaxWorldSize = 64;  // ranks are bits of a word
constexpr size_t kMaxAddends = 256;   // at least as many as ranks

enum class Operation : uint32_t { all_reduce = 1, broadcast, all_gather, reduce_scatter, barrier, sum_contributions };

// Where an addend of sum_contributions lies: a row of its rank's memory, below row 0.
struct Contribution {
  uint32_t rank;
  uint32_t row;
};

enum class WaitStatus : int { done = 0, lost, timed_out, mismatched, closed, interrupted, under_way };

struct WaitResult {
  WaitStatus status = WaitStatus::done;
  uint64_t ranks = 0;  // bit r: rank r died, is late, or closed its end
  std::string detail;  // what differs, for mismatched
};

struct RankState {
  int64_t process_id;
  uint64_t arrived;   // last round this rank has entered
  uint64_t finished;  // last round it is through with
  bool is_closed;
  bool is_running;
};

// The layout of the control block; see layout.h.
struct ControlHeader;
struct RankRegion;
struct Round;
struct Descriptor;

class SharedMemoryGroup {
 public:
  // The size of a group's control block. Staging slots are whole pages, and hold kSmallBytes for each rank.
  static uint64_t control_bytes(uint64_t world_size, uint64_t slot_bytes);

  // Map the control block, zeros at first, as `rank`. `token`: the group's own, by which ranks recognise each other's
  // segments. `order`: in which values are added. Sizes, token and order are the same on every rank.
  // Throws std::runtime_error where there is no memory for it.
  SharedMemoryGroup(int file_descriptor, size_t slot_bytes, size_t rank, size_t world_size, uint64_t token, Order order);
  ~SharedMemoryGroup();
  SharedMemoryGroup(const SharedMemoryGroup&) = delete;
  SharedMemoryGroup& operator=(const SharedMemoryGroup&) = delete;

  // After every rank has joined: begin to watch their processes. Throws where one cannot be seen.
  void watch_peers();

  // Tell the others of this rank's anonymous memory at `address`, which they may map: the file and its size, which is
  // sealed, because a file that shrank under its readers would kill them. The first page is ours. Returns an index for
  // release_segment, which the caller calls before the memory goes.
  // Throws std::runtime_error where there are too many.
  size_t adopt_segment(int file_descriptor, size_t bytes, char* address);
  void release_segment(size_t index);

  // Each begins an operation and returns its number, without waiting. Memory must stay as it is until the operation
  // was waited for. `scale` multiplies the addends.
  uint64_t all_reduce(char* data, size_t numel, ScalarKind kind, double scale);
  uint64_t broadcast(char* data, size_t bytes, size_t source_rank);
  uint64_t all_gather(const char* input, char* output, size_t bytes);
  uint64_t reduce_scatter(const char* input, char* output, size_t numel, ScalarKind kind, double scale);
  uint64_t barrier();

  // Sum contributions of which a rank may have any number, and write the sum to row 0 of every rank's memory, which is
  // adopted and has rows of `numel`. The order of addition is that of as many ranks as there are contributions.
  // `contributions`, the same on every rank, stay until the operation was waited for.
  uint64_t sum_contributions(char* memory, size_t numel, ScalarKind kind, const Contribution* contributions,
                             size_t count);

  // all_reduce and spin in one call; returns 0 if the sum is there, else the operation's number.
  uint64_t sum(char* data, size_t numel, ScalarKind kind, double scale);

  // Do what can be done without waiting; returns the last operation of which all before it are complete too.
  uint64_t progress();

  // Wait for an operation without sleeping, as long as that is worth it: see SpinLength. True if it is complete; false
  // also where an operation has failed, of which `wait` tells.
  bool spin(uint64_t operation);

  // Sleep until an operation is complete; call `spin` first. `is_interrupted` is asked now and then whether to give up.
  // After `timeout_s` the group has failed; with `is_slice` the operation is under way, and nothing has failed.
  WaitResult wait(uint64_t operation, double timeout_s, bool is_slice, const std::function<bool()>& is_interrupted);

  std::vector<RankState> states() const;

  // Whether an operation has failed, or a rank has closed its end: no further operation can succeed.
  bool has_ended();

  // Tell the others that this rank will not come again. Safe to call twice.
  void close();

 private:
  struct Call;  // an operation under way on this rank
  struct Cursor {
    uint64_t round;  // the next one
    uint64_t call;   // whose round it is
  };
  struct Peer {
    int process_fd = -1;
    uint64_t releases = 0;                 // as many of its releases are reflected in `segments`
    std::map<uint32_t, Mapping> segments;  // by segment id
  };

  uint64_t begin(const Call& begun);
  Call& call_at(uint64_t number);
  const Call& call_at(uint64_t number) const;
  void make_room_for_calls();
  bool advance();
  bool enter_rounds();
  bool reduce_rounds();
  bool finish_rounds();
  void enter(const Call& call, uint64_t round);
  void reduce_claimed_chunks(Call& call, uint64_t round);
  void finish(Call& call, uint64_t round);
  void move_on(Cursor& cursor);
  bool have_all_finished(uint64_t round);
  bool have_arrived(const Call& call, uint64_t round) const;
  bool check_agreement(const Call& call, uint64_t round);
  std::string describe_difference(uint64_t round) const;
  void add(const Call& call, uint64_t first, uint64_t numel, char* const* addends, char* const* sums, size_t sum_count);
  bool find_memory(const Call& call, uint64_t round, std::array<char*, kMaxWorldSize>* memory);
  char* peer_data(size_t rank, const Call& call, uint64_t round);
  Mapping& peer_segment(size_t rank, uint32_t slot, uint32_t id);
  void drop_released_segments();
  const char* own_segment_of(const char* data, size_t bytes, uint32_t* slot) const;
  void notify();
  void sleep_until_notified(uint64_t operation, double longest_s);
  uint64_t ranks_waited_for() const;
  bool is_running(size_t rank, int patience_ms = 0) const;
  void fail(WaitStatus status, uint64_t ranks, uint64_t round = 0);
  WaitResult failure() const;
  bool is_forked() const;
  void check_process() const;
  void check_usable() const;

  RankRegion& region(size_t rank) const;
  Round& round_state(uint64_t round) const;
  Descriptor& descriptor(size_t rank, uint64_t round) const;
  char* slot(size_t rank, uint64_t round) const;
  ControlHeader& header() const;

  size_t rank_;
  size_t world_size_;
  uint64_t token_;
  Order order_;
  size_t slot_bytes_;
  Mapping control_;
  bool may_spin_;
  int64_t process_id_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  std::vector<Call> calls_;  // a ring, as large as most were under way together; the call of number n has place n
  uint64_t first_call_ = 1;  // the first one that is not complete
  uint64_t next_call_ = 1;
  uint64_t next_round_ = 1;
  uint64_t all_finished_ = 0;  // every rank was through with this round when last seen
  SpinLength spin_length_;
  Cursor enter_{1, 1}, reduce_{1, 1}, finish_{1, 1};
  std::vector<char*> own_segments_;
  uint32_t last_segment_id_ = 0;
  std::string own_error_;  // why this rank cannot go on, if it threw
  bool is_closed_ = false;
};

}  // namespace psengine
