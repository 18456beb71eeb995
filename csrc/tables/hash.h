// SipHash-1-3 (Aumasson and Bernstein, 2012) of one 64-bit number: who does not know the key cannot choose collisions.
#pragma once

#include <cstdint>

namespace psengine {

struct HashKey {
  uint64_t low, high;
};

inline uint64_t siphash(const HashKey& key, uint64_t number) {
  uint64_t v0 = key.low ^ 0x736f6d6570736575u, v1 = key.high ^ 0x646f72616e646f6du;
  uint64_t v2 = key.low ^ 0x6c7967656e657261u, v3 = key.high ^ 0x7465646279746573u;
  const auto rotated = [](uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); };
  const auto round = [&] {
    v0 += v1, v1 = rotated(v1, 13) ^ v0, v0 = rotated(v0, 32);
    v2 += v3, v3 = rotated(v3, 16) ^ v2;
    v0 += v3, v3 = rotated(v3, 21) ^ v0;
    v2 += v1, v1 = rotated(v1, 17) ^ v2, v2 = rotated(v2, 32);
  };
  constexpr uint64_t kLastBlock = uint64_t(sizeof(number)) << 56;
  for (const uint64_t block : {number, kLastBlock}) {
    v3 ^= block;
    round();
    v0 ^= block;
  }
  v2 ^= 0xff;
  for (int i = 0; i < 3; ++i) round();
  return v0 ^ v1 ^ v2 ^ v3;
}

}  // namespace psengine
