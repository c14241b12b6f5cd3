// Lossless codecs of key/value elements, and the entropy coder that others build on.
//
// Formats: lmcache_core/codecs.py and reference.py of serde/lossless. Decoders trust nothing they read; scratch memory is kept per
// thread, so no call allocates once it has seen its largest input.
#pragma once

#include <vector>

#include "lmcache/kernels.hpp"

namespace lmcache {

// ---- rANS: 32 interleaved states of 32 bits, 16-bit renormalisation, static tables

inline constexpr std::size_t kLanes = 32;
inline constexpr u32 kRansLow = u32{1} << 16;
inline constexpr unsigned kRansBitsMost = 12;

// Tables of several classes. `slots`: per class 1 << bits of symbol << 24 | freq - 1 << 12 | bias.
struct RansTables {
    unsigned bits = 0;
    std::size_t classes = 0;
    std::vector<u32> slots;
    std::vector<u32> symbols;  // per class 256 of freq << 16 | start; freq 0: not in the table

    // Frequencies: 256 per class, each class summing to 1 << bits. False when they do not.
    bool build(const std::uint16_t* freqs, std::size_t classes, unsigned bits);
};

// Class of symbol i is classes[i % period]; every class is below tables.classes.
struct Classes {
    const u8* of;
    std::size_t period;
};

// Most bytes that n symbols take.
inline std::size_t rans_bound(std::size_t n, unsigned bits) {
    return 4 * kLanes + 2 * ((n * bits + 15) / 16 + kLanes + 1);
}

// Returns the bytes written to `out` (room `rans_bound`), or 0: a symbol is not in its table.
std::size_t rans_encode(const RansTables& tables, Classes classes, const u8* symbols, std::size_t n,
                        u8* out, std::size_t room);

// False: not what an encoder with these tables wrote.
bool rans_decode(const RansTables& tables, Classes classes, const u8* in, std::size_t bytes,
                 u8* symbols, std::size_t n);

// The same, and each symbol joined with its rest byte: out[i] = ror16(symbol << 8 | rest, 1).
bool rans_decode_join(const RansTables& tables, Classes classes, const u8* in, std::size_t bytes,
                      const u8* rest, u8* out, std::size_t n);

// Makes counts (in place) frequencies that sum to 1 << bits; what occurs keeps at least 1.
void rans_normalise(u32 counts[256], unsigned bits);

// ---- x12: bfloat16 with a 4-bit code for the exponent

std::size_t x12_bound(std::size_t bytes, std::size_t planes);
std::size_t x12_encode(const u8* in, std::size_t bytes, std::size_t planes, u8* out);
bool x12_decode(const u8* in, std::size_t coded, std::size_t planes, u8* out, std::size_t bytes);

// ---- xr: exponents by rANS, tables per channel class

// `item`: bytes of an element (1, 2, 4); `channels`: elements of one token in one plane.
std::size_t xr_bound(std::size_t bytes, std::size_t planes);
std::size_t xr_encode(const u8* in, std::size_t bytes, std::size_t planes, std::size_t item,
                      std::size_t channels, u8* out);
bool xr_decode(const u8* in, std::size_t coded, std::size_t planes, std::size_t item,
               std::size_t channels, u8* out, std::size_t bytes);

namespace detail {

// State of a decoder between its fast loop and its careful one.
struct RansState {
    u32 x[kLanes];
    const u8* next;
    const u8* end;
    std::size_t done;
};

// One instruction set's codec loops; null members: use the portable ones.
struct CodecKernels {
    // Blocks of 128 elements. `codes[15]` never matches; escapes are consumed from `*escapes`.
    bool (*x12_join)(u8* dst, const u8* low, const u8* codes, const u8* exponents, std::size_t blocks,
                     const u8** escapes, const u8* end);
    // Returns the escapes written to `escapes`, or `most` + 1 when they are more.
    std::size_t (*x12_split)(const u8* src, u8* low, u8* codes, const u8* code_of, std::size_t blocks,
                             u8* escapes, std::size_t most);
    // Whole steps of 32 symbols while the input lasts. `bases[period]`: class << bits; the period is
    // a multiple of 32. `rest` null: plain symbols.
    void (*rans)(RansState& state, const RansTables& tables, const u32* bases, std::size_t period,
                 const u8* rest, u8* out, std::size_t n);
    // Symbols [0, n) backwards, n a multiple of 32; words are written below `top`, which is
    // returned. `bases[period]`: class << 8. Null: a symbol is not in its table.
    u8* (*rans_encode)(u32* x, const RansTables& tables, const u32* bases, std::size_t period,
                       const u8* symbols, std::size_t n, u8* top);
};

const CodecKernels& codecs();
#if defined(__x86_64__)
const CodecKernels* codecs_avx512();
const CodecKernels* codecs_avx2();
#endif

}  // namespace detail
}  // namespace lmcache
