// Lossy codecs of key/value rows: integers of 8, 4 and 3 bits, codebooks, 8-bit floats.
//
// Format and arithmetic: serde/quant, whose reference gives the same bytes. Every step is one IEEE
// operation in single precision (no contraction), so all machines agree.
#pragma once

#include "lmcache/kernels.hpp"

namespace lmcache {

// How one plane is coded. Values stand in encoded segments.
enum class PlaneCode : u8 {
    int8_row = 1,      // symmetric, a scale for each token and head
    int8_channel = 2,  // symmetric, a scale for each channel in `group` tokens
    int4_row = 3,      // scale and zero for each token and head
    int4_hadamard = 4, // the same after signs and a Hadamard transform
    int4_channel = 5,  // scale and zero for each channel in `group` tokens
    int3_hadamard = 6,
    normal4 = 7,       // signs, Hadamard, Lloyd-Max levels of a normal distribution
    normal3 = 8,
    e4m3 = 9,          // 8-bit floats, a scale for each head
    e5m2 = 10,
};

enum class Element : u8 { bfloat16 = 0, float16 = 1, float32 = 2 };

inline constexpr std::size_t kMostDim = 1024;

// A plane: [token][head][dim].
struct PlaneShape {
    std::size_t tokens, heads, dim, group;

    std::size_t rows() const { return tokens * heads; }
    std::size_t channels() const { return heads * dim; }
    std::size_t groups() const { return (tokens + group - 1) / group; }
};

// Encoded bytes of a plane; 0 when the code cannot do this shape.
std::size_t quant_nbytes(PlaneCode code, const PlaneShape& shape);

// `out` has quant_nbytes. False: an element is not finite, or too large for its scale.
bool quant_encode(PlaneCode code, Element element, const PlaneShape& shape, const u8* in, u8* out);

// `in` has quant_nbytes; any bytes give some finite or infinite numbers.
void quant_decode(PlaneCode code, Element element, const PlaneShape& shape, const u8* in, u8* out);

}  // namespace lmcache
