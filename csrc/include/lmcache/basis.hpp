// Rows of keys or values in calibrated coordinates: symbols for the entropy coder, and back.
//
// Format and arithmetic: serde/cachegen, whose reference gives the same bytes. Every step is one IEEE operation
// in single precision (no contraction) and sums go by ascending index, so all machines agree.
#pragma once

#include <vector>

#include "lmcache/quant.hpp"

namespace lmcache {

inline constexpr u8 kEscape = 255;
inline constexpr int kMiddle = 127;         // the symbol of 0
inline constexpr float kFurthest = 32767;   // steps from the mean: what an escape can say

// Coordinates of one plane of one layer; no matrices: each channel is one.
struct Basis {
    std::size_t heads = 0, dim = 0;
    std::vector<float> mean;      // [heads][dim]
    std::vector<float> forward;   // [heads][dim of an element][dim of a coordinate]
    std::vector<float> backward;  // [heads][dim of a coordinate][dim of an element]
};

// How finely, for each coordinate of each head.
struct Fineness {
    const float* steps;
    const u8* limits;    // symbols beyond +-limit (at most 127) are escapes
    const u8* deltas;    // null: none; 0xFF: coded as the difference from the group's first token
    std::size_t group;   // tokens
    float rounding;      // what is added before truncation: 0.5, or less
};

// Rows of one plane of one segment.
struct BasisRows {
    Element element;
    std::size_t tokens;
    std::size_t stride;      // from the symbols of one token to the next
    const float* turns;      // null, or [tokens][cosines, sines][pairs]
    std::size_t pairs;
    bool interleaved;        // element 2 i turns with 2 i + 1, else i with pairs + i
};

// Returns the bytes written to `escapes`; -1: they would be more than `room`, -2: an element is not finite or
// too far from the mean.
std::ptrdiff_t basis_encode(const Basis& basis, const Fineness& fine, const BasisRows& rows, const u8* in,
                            u8* symbols, u8* escapes, std::size_t room);

// Returns the bytes taken from `escapes`, or -1: there are too few.
std::ptrdiff_t basis_decode(const Basis& basis, const Fineness& fine, const BasisRows& rows,
                            const u8* symbols, const u8* escapes, std::size_t bytes, u8* out);

}  // namespace lmcache
