// SHA-256 (FIPS 180-4) and the chained digests of token chunks.
#pragma once

#include "lmcache/kernels.hpp"

namespace lmcache {

inline constexpr std::size_t kChainBytes = 32;
inline constexpr char kChunkTag[] = "lmcache.chunk";  // hashed with its terminating zero

class Sha256 {
public:
    void update(const void* data, std::size_t n);
    void finish(u8 out[kChainBytes]);

private:
    u32 state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    u64 total_ = 0;
    std::size_t held_ = 0;
    u8 buffer_[64];
};

// Writes one digest per full chunk of `chunk_tokens` little-endian 32-bit ids to `out`:
// d[i] = SHA256(tag, d[i-1], u32(chunk_tokens), ids, u32(0)), d[-1] = root. No allocation.
void chain(const u8 root[kChainBytes], const u8* tokens, std::size_t chunks, u32 chunk_tokens,
           u8* out);

}  // namespace lmcache
