// Calibrated coordinates: one set of plain loops, compiled for several instruction sets.
#include "lmcache/basis.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant_rows.hpp"

namespace lmcache {
namespace {

constexpr std::size_t kRows = 4;
constexpr std::size_t kWide = 16;  // floats of one register; dim is a multiple

// A tile of rows; kept per thread, so no call allocates once it has seen its widest head.
struct Scratch {
    std::vector<float> x, y, inverse;
    std::vector<std::int32_t> q, anchor;

    void fit(std::size_t dim) {
        if (inverse.size() >= dim) return;
        x.resize(kRows * dim), y.resize(kRows * dim), q.resize(dim), anchor.resize(dim);
        inverse.resize(dim);
    }
};

Scratch& scratch(std::size_t dim) {
    thread_local Scratch kept;
    kept.fit(dim);
    return kept;
}

using Wide = float __attribute__((vector_size(4 * kWide)));
using Loose = float __attribute__((vector_size(4 * kWide), aligned(4), may_alias));

// y[r] += sum over i of x[r][i] * matrix[i], by ascending i; R rows and C registers at a time.
template <std::size_t R, std::size_t C>
LMCACHE_INLINE void multiply(const float* x, const float* matrix, float* y, std::size_t dim,
                             std::size_t row, std::size_t column) {
    Wide sum[R][C];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (std::size_t c = 0; c < C; ++c)
            sum[r][c] = *reinterpret_cast<const Loose*>(y + (row + r) * dim + column + kWide * c);
    for (std::size_t i = 0; i < dim; ++i) {
#pragma GCC unroll 8
        for (std::size_t c = 0; c < C; ++c) {
            const Wide line = *reinterpret_cast<const Loose*>(matrix + i * dim + column + kWide * c);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < R; ++r) sum[r][c] += line * x[(row + r) * dim + i];
        }
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (std::size_t c = 0; c < C; ++c)
            *reinterpret_cast<Loose*>(y + (row + r) * dim + column + kWide * c) = sum[r][c];
}

template <std::size_t R, std::size_t C>
LMCACHE_INLINE void transform(const float* x, const float* matrix, float* y, std::size_t dim) {
    for (std::size_t row = 0; row < kRows; row += R) {
        std::size_t column = 0;
        for (; column + C * kWide <= dim; column += C * kWide)
            multiply<R, C>(x, matrix, y, dim, row, column);
        for (; column < dim; column += kWide) multiply<R, 1>(x, matrix, y, dim, row, column);
    }
}

// `turn` times the angle of each pair; -1 undoes it.
LMCACHE_INLINE void rotate(float* row, const BasisRows& rows, std::size_t token, float turn) {
    const std::size_t n = rows.pairs, step = rows.interleaved ? 2 : 1, other = rows.interleaved ? 1 : n;
    const float* cosine = rows.turns + 2 * n * token;
    const float* sine = cosine + n;
    for (std::size_t i = 0; i < n; ++i) {
        const float a = row[step * i], b = row[step * i + other], s = turn * sine[i];
        row[step * i] = a * cosine[i] - b * s;
        row[step * i + other] = b * cosine[i] + a * s;
    }
}

LMCACHE_INLINE void load_any(Element element, const u8* in, float* row, std::size_t dim) {
    if (element == Element::bfloat16) load_row<Element::bfloat16>(in, row, dim);
    else if (element == Element::float16) load_row<Element::float16>(in, row, dim);
    else load_row<Element::float32>(in, row, dim);
}

LMCACHE_INLINE void store_any(Element element, u8* out, const float* row, std::size_t dim) {
    if (element == Element::bfloat16) store_row<Element::bfloat16>(out, row, dim);
    else if (element == Element::float16) store_row<Element::float16>(out, row, dim);
    else store_row<Element::float32>(out, row, dim);
}

template <std::size_t R, std::size_t C>
LMCACHE_INLINE std::ptrdiff_t encode(const Basis& basis, const Fineness& fine, const BasisRows& rows,
                                     const u8* in, u8* symbols, u8* escapes, std::size_t room) {
    const std::size_t dim = basis.dim, item = rows.element == Element::float32 ? 4 : 2;
    Scratch& kept = scratch(dim);
    std::int32_t* const q = kept.q.data();
    std::int32_t* const anchor = kept.anchor.data();
    std::size_t used = 0;
    for (std::size_t head = 0; head < basis.heads; ++head) {
        const std::size_t first = head * dim;
        const float* mean = basis.mean.data() + first;
        for (std::size_t j = 0; j < dim; ++j) kept.inverse[j] = 1.0F / fine.steps[first + j];
        for (std::size_t tile = 0; tile < rows.tokens; tile += kRows) {
            const std::size_t many = std::min(kRows, rows.tokens - tile);
            for (std::size_t r = 0; r < many; ++r) {
                float* x = kept.x.data() + r * dim;
                load_any(rows.element, in + ((tile + r) * basis.heads * dim + first) * item, x, dim);
                if (rows.turns) rotate(x, rows, tile + r, -1.0F);
                for (std::size_t i = 0; i < dim; ++i) x[i] -= mean[i];
            }
            float* coordinates = kept.x.data();
            if (!basis.forward.empty()) {
                coordinates = kept.y.data();
                std::fill_n(coordinates, kRows * dim, 0.0F);
                transform<R, C>(kept.x.data(), basis.forward.data() + first * dim, coordinates, dim);
            }
            for (std::size_t r = 0; r < many; ++r) {
                const float* y = coordinates + r * dim;
                const float* inverse = kept.inverse.data();
                u32 far = 0;
                for (std::size_t j = 0; j < dim; ++j) {
                    const float value = y[j] * inverse[j];
                    const bool near = std::fabs(value) <= kFurthest;
                    far |= !near;
                    const float kept_value = near ? value : 0.0F;
                    q[j] = static_cast<std::int32_t>(kept_value + std::copysign(fine.rounding, kept_value));
                }
                if (far) return -2;
                const std::size_t token = tile + r;
                if (fine.deltas) {
                    const bool begins = token % fine.group == 0;
                    for (std::size_t j = 0; j < dim; ++j) {
                        const std::int32_t now = q[j];
                        const bool differs = !begins && fine.deltas[first + j];
                        q[j] -= differs ? anchor[j] : 0;
                        anchor[j] = begins ? now : anchor[j];
                    }
                }
                u8* to = symbols + token * rows.stride + first;
                const u8* limits = fine.limits + first;
                u32 beyond = 0;
                for (std::size_t j = 0; j < dim; ++j) {
                    const bool out = std::abs(q[j]) > limits[j];
                    beyond |= out;
                    to[j] = out ? kEscape : static_cast<u8>(q[j] + kMiddle);
                }
                for (std::size_t j = 0; beyond && j < dim; ++j) {
                    if (to[j] != kEscape) continue;
                    if (std::abs(q[j]) > static_cast<std::int32_t>(kFurthest)) return -2;
                    if (used + 2 > room) return -1;
                    const auto word = static_cast<std::int16_t>(q[j]);
                    std::memcpy(escapes + used, &word, 2);
                    used += 2;
                }
            }
        }
    }
    return static_cast<std::ptrdiff_t>(used);
}

template <std::size_t R, std::size_t C>
LMCACHE_INLINE std::ptrdiff_t decode(const Basis& basis, const Fineness& fine, const BasisRows& rows,
                                     const u8* symbols, const u8* escapes, std::size_t bytes, u8* out) {
    const std::size_t dim = basis.dim, item = rows.element == Element::float32 ? 4 : 2;
    Scratch& kept = scratch(dim);
    std::int32_t* const q = kept.q.data();
    std::int32_t* const anchor = kept.anchor.data();
    std::size_t used = 0;
    for (std::size_t head = 0; head < basis.heads; ++head) {
        const std::size_t first = head * dim;
        const float* mean = basis.mean.data() + first;
        const float* steps = fine.steps + first;
        for (std::size_t tile = 0; tile < rows.tokens; tile += kRows) {
            const std::size_t many = std::min(kRows, rows.tokens - tile);
            for (std::size_t r = 0; r < many; ++r) {
                const std::size_t token = tile + r;
                const u8* from = symbols + token * rows.stride + first;
                u32 beyond = 0;
                for (std::size_t j = 0; j < dim; ++j) {
                    q[j] = from[j] - kMiddle;
                    beyond |= from[j] == kEscape;
                }
                for (std::size_t j = 0; beyond && j < dim; ++j) {
                    if (from[j] != kEscape) continue;
                    if (used + 2 > bytes) return -1;
                    std::int16_t word;
                    std::memcpy(&word, escapes + used, 2);
                    q[j] = word;
                    used += 2;
                }
                if (fine.deltas) {
                    const bool begins = token % fine.group == 0;
                    for (std::size_t j = 0; j < dim; ++j) {
                        q[j] += !begins && fine.deltas[first + j] ? anchor[j] : 0;
                        anchor[j] = begins ? q[j] : anchor[j];
                    }
                }
                float* x = kept.x.data() + r * dim;
                for (std::size_t j = 0; j < dim; ++j) x[j] = static_cast<float>(q[j]) * steps[j];
            }
            float* elements = kept.y.data();
            if (basis.backward.empty()) {
                for (std::size_t r = 0; r < many; ++r)
                    for (std::size_t i = 0; i < dim; ++i)
                        elements[r * dim + i] = mean[i] + kept.x[r * dim + i];
            } else {
                for (std::size_t r = 0; r < kRows; ++r)
                    std::copy_n(mean, dim, elements + r * dim);
                transform<R, C>(kept.x.data(), basis.backward.data() + first * dim, elements, dim);
            }
            for (std::size_t r = 0; r < many; ++r) {
                float* row = elements + r * dim;
                if (rows.turns) rotate(row, rows, tile + r, 1.0F);
                store_any(rows.element, out + ((tile + r) * basis.heads * dim + first) * item, row, dim);
            }
        }
    }
    return static_cast<std::ptrdiff_t>(used);
}

#define LMCACHE_BASIS(NAME, TARGET, R, C)                                                           \
    TARGET std::ptrdiff_t NAME##_encode(const Basis& basis, const Fineness& fine,                   \
                                        const BasisRows& rows, const u8* in, u8* symbols,           \
                                        u8* escapes, std::size_t room) {                            \
        return encode<R, C>(basis, fine, rows, in, symbols, escapes, room);                         \
    }                                                                                               \
    TARGET std::ptrdiff_t NAME##_decode(const Basis& basis, const Fineness& fine,                   \
                                        const BasisRows& rows, const u8* symbols,                   \
                                        const u8* escapes, std::size_t bytes, u8* out) {            \
        return decode<R, C>(basis, fine, rows, symbols, escapes, bytes, out);                       \
    }

struct Set {
    decltype(&basis_encode) encode;
    decltype(&basis_decode) decode;
};

LMCACHE_BASIS(plain, , 1, 1)
constexpr Set plain_set = {plain_encode, plain_decode};
#if defined(__x86_64__)
LMCACHE_BASIS(avx2, __attribute__((target("avx2"))), 2, 2)
constexpr Set avx2_set = {avx2_encode, avx2_decode};
LMCACHE_BASIS(avx512,
              __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))), 4, 4)
constexpr Set avx512_set = {avx512_encode, avx512_decode};
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

std::ptrdiff_t basis_encode(const Basis& basis, const Fineness& fine, const BasisRows& rows, const u8* in,
                            u8* symbols, u8* escapes, std::size_t room) {
    return best().encode(basis, fine, rows, in, symbols, escapes, room);
}

std::ptrdiff_t basis_decode(const Basis& basis, const Fineness& fine, const BasisRows& rows,
                            const u8* symbols, const u8* escapes, std::size_t bytes, u8* out) {
    return best().decode(basis, fine, rows, symbols, escapes, bytes, out);
}

}  // namespace lmcache
