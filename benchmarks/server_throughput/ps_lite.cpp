// Push and pull with ps-lite, for run.py: one program for its scheduler, its server (which applies SGD) and its workers.
// A worker reads the number of elements of each chunk, then a line for each round trip, and answers with a line.

#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <vector>

#include "ps/ps.h"

constexpr float kLearningRate = 1e-3f;

// Its server answers with the weights where they are: like the echo's, it copies nothing and checks nothing.
void Apply(const ps::KVMeta& meta, const ps::KVPairs<float>& data, ps::KVServer<float>* server) {
  static std::unordered_map<ps::Key, std::vector<float>> chunks;
  std::vector<float>& weights = chunks[data.keys[0]];
  weights.resize(data.vals.size());
  for (size_t i = 0; i < weights.size(); ++i) weights[i] -= kLearningRate * data.vals[i];
  ps::KVPairs<float> answer;
  answer.keys = data.keys;
  answer.vals = ps::SArray<float>(weights.data(), weights.size());
  server->Response(meta, answer);
}

void Work() {
  std::setvbuf(stdin, nullptr, _IONBF, 0);
  size_t count = 0;
  if (std::scanf("%zu", &count) != 1) return;
  std::vector<size_t> numels(count);
  for (size_t& numel : numels)
    if (std::scanf("%zu", &numel) != 1) return;
  std::vector<std::vector<float>> gradients, packed, weights;
  for (size_t numel : numels) {
    gradients.emplace_back(numel, 0.5f);
    packed.emplace_back(numel);
    weights.emplace_back(numel);
  }
  std::vector<ps::SArray<float>> targets;
  for (auto& chunk : weights) targets.emplace_back(chunk.data(), chunk.size());
  ps::KVWorker<float> worker(0, 0);
  std::getchar();  // the line's end
  while (std::getchar() == '\n') {
    std::vector<int> pending;
    for (size_t chunk = 0; chunk < count; ++chunk) {
      std::copy(gradients[chunk].begin(), gradients[chunk].end(), packed[chunk].begin());
      ps::SArray<float> values(packed[chunk].data(), packed[chunk].size());
      pending.push_back(worker.ZPushPull(ps::SArray<ps::Key>{ps::Key(chunk)}, values, &targets[chunk]));
    }
    for (int request : pending) worker.Wait(request);
    std::puts("");
    std::fflush(stdout);
  }
}

int main() {
  ps::Start(0, "ps_lite\0");
  if (ps::IsServer()) {
    auto* server = new ps::KVServer<float>(0);
    server->set_request_handle(Apply);
    ps::RegisterExitCallback([server] { delete server; });
  }
  if (ps::IsWorker()) Work();
  ps::Finalize(0, true);
}
