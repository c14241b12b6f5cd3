// bfloat16 in 12 bits and a little: sign and mantissa as they are, a 4-bit code for the exponent.
//
// A plane of n elements, n = 128 blocks + tail: u8 mode, 15 exponents, u32 escapes, 12 zeros; then n
// bytes sign << 7 | mantissa; n/2 bytes of codes (element i of a block and element i + 64 share byte
// i, the first in its low half; of a tail likewise with half its length); then room for n/256
// exponents that have no code (code 15), in order. More of these: mode 0, the plane as it is.
// Planes follow each other; zeros fill the last 512 bytes.
#include <algorithm>
#include <cstring>

#include "lmcache/codecs.hpp"

namespace lmcache {
namespace {

constexpr std::size_t kHead = 32, kBlock = 128, kAlign = 512;
constexpr u8 kPlain = 0, kCoded = 1;

std::size_t room_for_escapes(std::size_t n) {
    return (n + 255) / 256;
}

std::size_t coded_bytes(std::size_t n) {
    return kHead + n + (n + 1) / 2 + room_for_escapes(n);
}

std::size_t aligned(std::size_t bytes) {
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

u8 exponent(u32 word) {
    return static_cast<u8>(word >> 7);
}

u32 load16(const u8* at) {
    std::uint16_t word;
    std::memcpy(&word, at, 2);
    return word;
}

void put(u8* at, u32 low, u32 exponent) {
    const auto word = static_cast<std::uint16_t>((low & 0x80) << 8 | exponent << 7 | (low & 0x7F));
    std::memcpy(at, &word, 2);
}

// The 15 commonest exponents, most common first. Looks at 64 elements in 704: no usual number of
// channels divides that, so all of them are seen.
void choose(const u8* in, std::size_t n, u8 codebook[15]) {
    u32 counts[256] = {};
    const std::size_t step = n < 8192 ? 64 : 704;
    for (std::size_t begin = 0; begin < n; begin += step) {
        const std::size_t end = std::min(n, begin + 64);
        for (std::size_t i = begin; i < end; ++i) ++counts[exponent(load16(in + 2 * i))];
    }
    for (unsigned code = 0; code < 15; ++code) {
        const auto best = std::max_element(counts, counts + 256) - counts;
        codebook[code] = static_cast<u8>(best);
        counts[best] = 0;
    }
}

std::size_t split(const u8* src, std::size_t n, u8* low, u8* codes, const u8* code_of, u8* escapes,
                  std::size_t used, std::size_t most) {
    const std::size_t half = (n + 1) / 2;
    std::memset(codes, 0, half);
    for (std::size_t i = 0; i < n; ++i) {
        const u32 word = load16(src + 2 * i);
        low[i] = static_cast<u8>((word >> 8 & 0x80) | (word & 0x7F));
        const u8 code = code_of[exponent(word)];
        codes[i % half] = static_cast<u8>(codes[i % half] | (i < half ? code : code << 4));
        if (code == 15) {
            if (used == most) return most + 1;
            escapes[used++] = exponent(word);
        }
    }
    return used;
}

bool join(u8* dst, std::size_t n, const u8* low, const u8* codes, const u8* codebook,
          const u8** escapes, const u8* end) {
    const std::size_t half = (n + 1) / 2;
    for (std::size_t i = 0; i < n; ++i) {
        const unsigned code = i < half ? codes[i] & 15 : codes[i - half] >> 4;
        u32 value = codebook[code];
        if (code == 15) {
            if (*escapes == end) return false;
            value = *(*escapes)++;
        }
        put(dst + 2 * i, low[i], value);
    }
    return true;
}

std::size_t encode_plane(const u8* in, std::size_t n, u8* out) {
    u8 code_of[256];
    std::memset(out, 0, kHead);
    u8* codebook = out + 1;
    choose(in, n, codebook);
    std::memset(code_of, 15, sizeof code_of);
    for (unsigned code = 15; code-- > 0;) code_of[codebook[code]] = static_cast<u8>(code);
    u8 *low = out + kHead, *codes = low + n, *escapes = codes + (n + 1) / 2;
    const std::size_t blocks = n / kBlock, tail = n % kBlock, most = room_for_escapes(n);
    std::size_t used = 0;
    if (const auto kernel = detail::codecs().x12_split) {
        used = kernel(in, low, codes, code_of, blocks, escapes, most);
    } else {
        for (std::size_t b = 0; b < blocks && used <= most; ++b) {
            used = split(in + 2 * kBlock * b, kBlock, low + kBlock * b, codes + kBlock / 2 * b,
                         code_of, escapes, used, most);
        }
    }
    if (used <= most && tail) {
        used = split(in + 2 * kBlock * blocks, tail, low + kBlock * blocks,
                     codes + kBlock / 2 * blocks, code_of, escapes, used, most);
    }
    if (used > most) {
        out[0] = kPlain;
        std::copy_n(in, 2 * n, out + 1);
        return 1 + 2 * n;
    }
    out[0] = kCoded;
    const auto count = static_cast<u32>(used);
    std::memcpy(out + 16, &count, 4);
    std::memset(escapes + used, 0, most - used);
    return coded_bytes(n);
}

// Bytes read, 0 when they are no plane.
std::size_t decode_plane(const u8* in, std::size_t left, u8* out, std::size_t n) {
    if (left == 0) return 0;
    if (in[0] == kPlain && left >= 1 + 2 * n) {
        std::copy_n(in + 1, 2 * n, out);
        return 1 + 2 * n;
    }
    u32 count = 0;
    if (in[0] != kCoded || left < coded_bytes(n)) return 0;
    std::memcpy(&count, in + 16, 4);
    if (count > room_for_escapes(n)) return 0;
    u8 codebook[16];
    std::memcpy(codebook, in + 1, 15);
    codebook[15] = 0;
    const u8 *low = in + kHead, *codes = low + n, *escapes = codes + (n + 1) / 2;
    const u8* end = escapes + count;
    const std::size_t blocks = n / kBlock, tail = n % kBlock;
    bool good = true;
    if (const auto kernel = detail::codecs().x12_join) {
        good = kernel(out, low, codes, codebook, blocks, &escapes, end);
    } else {
        for (std::size_t b = 0; b < blocks && good; ++b) {
            good = join(out + 2 * kBlock * b, kBlock, low + kBlock * b, codes + kBlock / 2 * b,
                        codebook, &escapes, end);
        }
    }
    good = good && join(out + 2 * kBlock * blocks, tail, low + kBlock * blocks,
                        codes + kBlock / 2 * blocks, codebook, &escapes, end);
    return good && escapes == end ? coded_bytes(n) : 0;
}

}  // namespace

std::size_t x12_bound(std::size_t bytes, std::size_t planes) {
    const std::size_t n = bytes / planes / 2;
    return aligned(planes * std::max(1 + 2 * n, coded_bytes(n)));
}

std::size_t x12_encode(const u8* in, std::size_t bytes, std::size_t planes, u8* out) {
    const std::size_t n = bytes / planes / 2;
    std::size_t at = 0;
    for (std::size_t p = 0; p < planes; ++p) at += encode_plane(in + 2 * n * p, n, out + at);
    std::memset(out + at, 0, aligned(at) - at);
    return aligned(at);
}

bool x12_decode(const u8* in, std::size_t coded, std::size_t planes, u8* out, std::size_t bytes) {
    const std::size_t n = bytes / planes / 2;
    std::size_t at = 0;
    for (std::size_t p = 0; p < planes; ++p) {
        const std::size_t used = decode_plane(in + at, coded - at, out + 2 * n * p, n);
        if (!used) return false;
        at += used;
    }
    return aligned(at) == coded;
}

const detail::CodecKernels& detail::codecs() {
    static const CodecKernels portable = {};
    const char* name = kernels().name;
#if defined(__x86_64__)
    if (std::strcmp(name, "scalar") != 0) {
        if (const auto* best = std::strcmp(name, "avx512") ? nullptr : codecs_avx512()) return *best;
        if (const auto* good = codecs_avx2()) return *good;
    }
#endif
    (void)name;
    return portable;
}

}  // namespace lmcache
