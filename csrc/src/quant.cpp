// Quantising codecs: one set of plain loops, compiled for several instruction sets.
#include "quant_codes.hpp"

namespace lmcache {
namespace {

// -- choice

// One instruction set, by element type.
struct Set {
    bool (*encode[3])(PlaneCode, const PlaneShape&, const u8*, u8*);
    void (*decode[3])(PlaneCode, const PlaneShape&, const u8*, u8*);
};

// `D`: a usual number of elements of a head that compilers may unroll for, or 0.
template <Element E, std::size_t D>
LMCACHE_INLINE bool encode_as(PlaneCode code, const PlaneShape& s, const u8* in, u8* out) {
    switch (code) {
        case PlaneCode::int8_row: return int8_row_encode<E, D>(s, in, out);
        case PlaneCode::int8_channel: return channel_encode<E, 8>(s, in, out);
        case PlaneCode::int4_row: return range_row_encode<E, D, 4, false>(s, in, out);
        case PlaneCode::int4_hadamard: return range_row_encode<E, D, 4, true>(s, in, out);
        case PlaneCode::int4_channel: return channel_encode<E, 4>(s, in, out);
        case PlaneCode::int3_hadamard: return range_row_encode<E, D, 3, true>(s, in, out);
        case PlaneCode::normal4: return normal_encode<E, D, 4>(s, in, out);
        case PlaneCode::normal3: return normal_encode<E, D, 3>(s, in, out);
        case PlaneCode::e4m3: return fp8_encode<E, D, 3>(s, in, out);
        case PlaneCode::e5m2: return fp8_encode<E, D, 2>(s, in, out);
    }
    return false;
}

template <Element E, std::size_t D>
LMCACHE_INLINE void decode_as(PlaneCode code, const PlaneShape& s, const u8* in, u8* out) {
    switch (code) {
        case PlaneCode::int8_row: return int8_row_decode<E, D>(s, in, out);
        case PlaneCode::int8_channel: return channel_decode<E, 8>(s, in, out);
        case PlaneCode::int4_row: return range_row_decode<E, D, 4, false>(s, in, out);
        case PlaneCode::int4_hadamard: return range_row_decode<E, D, 4, true>(s, in, out);
        case PlaneCode::int4_channel: return channel_decode<E, 4>(s, in, out);
        case PlaneCode::int3_hadamard: return range_row_decode<E, D, 3, true>(s, in, out);
        case PlaneCode::normal4: return normal_decode<E, D, 4>(s, in, out);
        case PlaneCode::normal3: return normal_decode<E, D, 3>(s, in, out);
        case PlaneCode::e4m3: return fp8_decode<E, D, 3>(s, in, out);
        case PlaneCode::e5m2: return fp8_decode<E, D, 2>(s, in, out);
    }
}

#define LMCACHE_QUANT(NAME, TARGET)                                                              \
    template <Element E, bool usual>                                                             \
    TARGET bool NAME##_encode(PlaneCode code, const PlaneShape& s, const u8* in, u8* out) {      \
        if constexpr (usual) {                                                                   \
            if (s.dim == 64) return encode_as<E, 64>(code, s, in, out);                          \
            if (s.dim == 128) return encode_as<E, 128>(code, s, in, out);                        \
        }                                                                                        \
        return encode_as<E, 0>(code, s, in, out);                                                \
    }                                                                                            \
    template <Element E, bool usual>                                                             \
    TARGET void NAME##_decode(PlaneCode code, const PlaneShape& s, const u8* in, u8* out) {      \
        if constexpr (usual) {                                                                   \
            if (s.dim == 64) return decode_as<E, 64>(code, s, in, out);                          \
            if (s.dim == 128) return decode_as<E, 128>(code, s, in, out);                        \
        }                                                                                        \
        return decode_as<E, 0>(code, s, in, out);                                                \
    }

// Unrolled for what is common; compilers take long over the rest.
#define LMCACHE_QUANT_SET(NAME, usual)                                                           \
    constexpr Set NAME##_set = {                                                                 \
        {NAME##_encode<Element::bfloat16, usual>, NAME##_encode<Element::float16, false>,        \
         NAME##_encode<Element::float32, false>},                                                \
        {NAME##_decode<Element::bfloat16, usual>, NAME##_decode<Element::float16, false>,        \
         NAME##_decode<Element::float32, false>}};

LMCACHE_QUANT(plain, )
LMCACHE_QUANT_SET(plain, false)
#if defined(__x86_64__)
LMCACHE_QUANT(avx2, __attribute__((target("avx2"))))
LMCACHE_QUANT_SET(avx2, true)
LMCACHE_QUANT(avx512,
              __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
LMCACHE_QUANT_SET(avx512, true)
#endif

const Set& best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return avx512_set;
    if (__builtin_cpu_supports("avx2")) return avx2_set;
#endif
    return plain_set;
}

}  // namespace

std::size_t quant_nbytes(PlaneCode code, const PlaneShape& s) {
    if (!s.tokens || !s.heads || !s.group || s.dim % 8 || !s.dim || s.dim > kMostDim) return 0;
    const std::size_t all = s.rows() * s.dim, n = s.channels();
    switch (code) {
        case PlaneCode::int8_row: return 2 * s.rows() + all;
        case PlaneCode::int8_channel: return 2 * n * s.groups() + all;
        case PlaneCode::int4_row:
        case PlaneCode::int4_hadamard: return 4 * s.rows() + all / 2;
        case PlaneCode::int4_channel: {
            const std::size_t whole = s.tokens / s.group, rest = s.tokens % s.group;
            return 4 * n * s.groups() + n * (whole * ((s.group + 1) / 2) + (rest + 1) / 2);
        }
        case PlaneCode::int3_hadamard: return 4 * s.rows() + all / 8 * 3;
        case PlaneCode::normal4: return 2 * s.rows() + all / 2;
        case PlaneCode::normal3: return 2 * s.rows() + all / 8 * 3;
        case PlaneCode::e4m3:
        case PlaneCode::e5m2: return 4 * s.heads + all;
    }
    return 0;
}

bool quant_encode(PlaneCode code, Element element, const PlaneShape& shape, const u8* in, u8* out) {
    return best().encode[static_cast<u8>(element)](code, shape, in, out);
}

void quant_decode(PlaneCode code, Element element, const PlaneShape& shape, const u8* in, u8* out) {
    best().decode[static_cast<u8>(element)](code, shape, in, out);
}

}  // namespace lmcache
