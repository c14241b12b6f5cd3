// The loops that depend on the processor, chosen once at run time.
//
// Everything above this header is plain C++; everything below is compiled for several instruction
// sets side by side (target attributes, never a build flag for the whole library).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lmcache {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline constexpr std::size_t kLine = 64;          // a cache line, and one XXH3 stripe
inline constexpr unsigned kStripesPerBlock = 16;  // XXH3 scrambles after 1 KiB
inline constexpr std::size_t kSecretBytes = 192;
inline constexpr std::ptrdiff_t kAhead = 1024;  // prefetch distance in contiguous memory

// The running state of a long XXH3 digest.
struct Lanes {
    alignas(64) u64 acc[8];
    alignas(64) u8 secret[kSecretBytes];
    unsigned stripe;  // position inside the current block, 0..15
};

// A two-level strided set of equally long runs. Strides are in bytes; the source side is read, the
// target side written. Order: outer, inner, bytes of a run.
struct Runs {
    std::size_t run;
    std::size_t inner = 1;
    std::ptrdiff_t inner_src = 0, inner_dst = 0;
    std::size_t outer = 1;
    std::ptrdiff_t outer_src = 0, outer_dst = 0;
    std::ptrdiff_t ahead = kAhead;  // from a line being read to the one worth requesting now

    std::size_t bytes() const { return run * inner * outer; }
};

enum class Store : unsigned {
    none,    // nothing is written: digest only
    plain,   // ordinary stores
    stream,  // non-temporal stores of whole lines: target and target strides are multiples of 64
};

// One instruction set. `run` of every Runs is a multiple of 64.
struct Kernels {
    const char* name;
    // Moves (per `Store`) and absorbs into `lanes`, which may be null unless store is none.
    void (*move)(Lanes* lanes, u8* dst, const u8* src, const Runs& runs, Store store);
    // SHA-256 compression of whole 64-byte blocks.
    void (*sha256)(u32 state[8], const u8* blocks, std::size_t count);
};

// The best set of this processor, or the one chosen by `select`.
const Kernels& kernels();

// All sets that run here, best first; `scalar` is always the last.
std::span<const Kernels* const> available();

// Uses the named set from now on (tests, benchmarks); false if it does not run here.
bool select(const char* name);

// Makes streamed stores visible before any later store. Call it once at the end of an operation.
void fence();

// XXH3 primes shared by all implementations (public xxHash specification).
inline constexpr u64 kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
inline constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87U, kPrime64_2 = 0xC2B2AE3D27D4EB4FU,
                     kPrime64_3 = 0x165667B19E3779F9U, kPrime64_4 = 0x85EBCA77C2B2AE63U,
                     kPrime64_5 = 0x27D4EB2F165667C5U;

// SHA-256 round constants (FIPS 180-4).
extern const u32 kSha256Rounds[64];

namespace detail {
extern const Kernels scalar;
#if defined(__x86_64__)
const Kernels* avx512();  // null where the processor lacks it
const Kernels* avx2();
#elif defined(__aarch64__)
const Kernels* neon();
#endif
}  // namespace detail

}  // namespace lmcache
