// Exponents by rANS with a table per channel class, the other bits as they are.
//
// An element rotated left by one has its exponent in the top byte (of 16-bit floats with a shorter
// exponent: and the first bits of the mantissa); that byte is the symbol, the others are stored raw.
// One-byte elements are symbols themselves.
//
// A plane: u8 mode, u8 bits, u8 classes, zero, u32 bytes that follow. Mode 0: the plane as it is.
// Mode 1: u8 class of each channel if there are several; per class u8 first symbol, u8 symbols - 1,
// u16 frequency each; the raw bytes of all elements; the coder's bytes.
#include <algorithm>
#include <cstring>

#include "lmcache/codecs.hpp"

namespace lmcache {
namespace {

constexpr std::size_t kHead = 8, kClassesMost = 8, kSymbolsPerClass = 6144;
constexpr unsigned kBits = 11;
constexpr u8 kPlain = 0, kCoded = 1;

struct Scratch {
    RansTables tables;
    std::vector<u8> symbols;
    std::vector<u32> sums;
    std::vector<u8> work;  // a coded plane, until it is known to be worth it
    u8 zero = 0;
};

Scratch& scratch() {
    thread_local Scratch kept;
    return kept;
}

// Most that the maps and tables of a plane take.
std::size_t side_bytes(std::size_t channels) {
    return channels + kClassesMost * (2 + 2 * 256);
}

template <class Word>
void take_apart(const u8* in, std::size_t n, u8* symbols, u8* rest) {
    constexpr std::size_t size = sizeof(Word), others = size - 1;
    for (std::size_t i = 0; i < n; ++i) {
        Word word;
        std::memcpy(&word, in + size * i, size);
        word = static_cast<Word>(word << 1 | word >> (8 * size - 1));
        symbols[i] = static_cast<u8>(word >> 8 * others);
        std::memcpy(rest + others * i, &word, others);
    }
}

template <class Word>
void put_together(const u8* symbols, const u8* rest, std::size_t n, u8* out) {
    constexpr std::size_t size = sizeof(Word), others = size - 1;
    for (std::size_t i = 0; i < n; ++i) {
        Word word = 0;
        std::memcpy(&word, rest + others * i, others);
        word = static_cast<Word>(word | static_cast<Word>(symbols[i]) << 8 * others);
        word = static_cast<Word>(word >> 1 | word << (8 * size - 1));
        std::memcpy(out + size * i, &word, size);
    }
}

// Groups channels of similar mean symbol, about equally many in each class.
void classify(const u8* symbols, std::size_t n, std::size_t channels, std::size_t classes, u8* of) {
    auto& sums = scratch().sums;
    sums.assign(std::max(sums.size(), channels), 0);
    const std::size_t rows = n / channels, step = std::max<std::size_t>(1, rows / 64);
    u32 looked = 0;
    for (std::size_t row = 0; row < rows; row += step, ++looked) {
        const u8* from = symbols + row * channels;
        for (std::size_t c = 0; c < channels; ++c) sums[c] += from[c];
    }
    u32 before[4096] = {};  // channels with a smaller mean, in sixteenths
    for (std::size_t c = 0; c < channels; ++c) {
        sums[c] = std::min<u32>(4095, 16 * sums[c] / looked);
        ++before[sums[c]];
    }
    u32 total = 0;
    for (u32& each : before) {
        const u32 here = each;
        each = total;
        total += here;
    }
    for (std::size_t c = 0; c < channels; ++c)
        of[c] = static_cast<u8>(before[sums[c]] * classes / channels);
}

// Writes the tables of all classes; returns their length.
std::size_t put_tables(u32 (*counts)[256], std::size_t classes, unsigned bits, u8* out) {
    std::size_t at = 0;
    for (std::size_t c = 0; c < classes; ++c) {
        rans_normalise(counts[c], bits);
        std::size_t first = 0, last = 255;
        while (!counts[c][first]) ++first;
        while (!counts[c][last]) --last;
        out[at++] = static_cast<u8>(first);
        out[at++] = static_cast<u8>(last - first);
        for (std::size_t s = first; s <= last; ++s, at += 2) {
            const auto freq = static_cast<std::uint16_t>(counts[c][s]);
            std::memcpy(out + at, &freq, 2);
        }
    }
    return at;
}

// Reads them into the scratch tables; returns their length, 0 when they are none.
std::size_t get_tables(const u8* in, std::size_t left, std::size_t classes, unsigned bits) {
    std::uint16_t freqs[kClassesMost][256] = {};
    std::size_t at = 0;
    for (std::size_t c = 0; c < classes; ++c) {
        if (left - at < 2) return 0;
        const std::size_t first = in[at], count = in[at + 1] + std::size_t{1};
        at += 2;
        if (first + count > 256 || left - at < 2 * count) return 0;
        std::memcpy(freqs[c] + first, in + at, 2 * count);
        at += 2 * count;
    }
    return scratch().tables.build(freqs[0], classes, bits) ? at : 0;
}

std::size_t encode_plane(const u8* in, std::size_t n, std::size_t item, std::size_t channels,
                         u8* out) {
    auto& [tables, symbols, sums, work, zero] = scratch();
    const std::size_t bytes = n * item, raw = n * (item - 1);
    const std::size_t most = side_bytes(channels) + raw + rans_bound(n, kBits);
    if (symbols.size() < n) symbols.resize(n);
    if (work.size() < most) work.resize(most);
    std::size_t classes = std::clamp<std::size_t>(n / kSymbolsPerClass, 1, kClassesMost);
    if (n == 0 || n % channels) classes = 1;
    u8* at = work.data();
    u8* of = &zero;
    if (classes > 1) {
        of = at;
        at += channels;
    }
    u8* rest = work.data() + side_bytes(channels);  // moved up to the tables once these are known
    if (item == 1) std::copy_n(in, n, symbols.data());
    if (item == 2) take_apart<std::uint16_t>(in, n, symbols.data(), rest);
    if (item == 4) take_apart<u32>(in, n, symbols.data(), rest);
    if (classes > 1) classify(symbols.data(), n, channels, classes, of);
    u32 counts[kClassesMost][256] = {};
    const std::size_t period = classes > 1 ? channels : 1;
    if (classes > 1) {
        for (std::size_t row = 0; row < n; row += channels)
            for (std::size_t c = 0; c < channels; ++c) ++counts[of[c]][symbols[row + c]];
    } else {
        for (std::size_t i = 0; i < n; ++i) ++counts[0][symbols[i]];
    }
    const std::size_t side = put_tables(counts, classes, kBits, at);
    const bool built = get_tables(at, side, classes, kBits) == side;
    at += side;
    std::copy(rest, rest + raw, at);
    at += raw;
    const Classes groups = {of, period};
    const std::size_t coded =
        built ? rans_encode(tables, groups, symbols.data(), n, at, rans_bound(n, kBits)) : 0;
    at += coded;
    const auto made = static_cast<std::size_t>(at - work.data());
    const bool plain = !coded || made >= bytes;
    const std::size_t follow = plain ? bytes : made;
    std::copy_n(plain ? in : work.data(), follow, out + kHead);
    const u8 head[4] = {plain ? kPlain : kCoded, kBits, static_cast<u8>(classes), 0};
    const auto length = static_cast<u32>(follow);
    std::memcpy(out, head, 4);
    std::memcpy(out + 4, &length, 4);
    return kHead + follow;
}

// Bytes read, 0 when they are no plane.
std::size_t decode_plane(const u8* in, std::size_t left, u8* out, std::size_t n, std::size_t item,
                         std::size_t channels) {
    auto& [tables, symbols, sums, work, zero] = scratch();
    if (left < kHead) return 0;
    u32 follow;
    std::memcpy(&follow, in + 4, 4);
    if (follow > left - kHead) return 0;
    const u8 *at = in + kHead, *end = at + follow;
    if (in[0] == kPlain) {
        if (follow != n * item) return 0;
        std::copy_n(at, n * item, out);
        return kHead + follow;
    }
    const std::size_t classes = in[2], raw = n * (item - 1);
    if (in[0] != kCoded || classes < 1 || classes > kClassesMost) return 0;
    Classes groups = {&zero, 1};
    if (classes > 1) {
        if (follow < channels || std::any_of(at, at + channels, [=](u8 c) { return c >= classes; }))
            return 0;
        groups = {at, channels};
        at += channels;
    }
    const std::size_t side = get_tables(at, static_cast<std::size_t>(end - at), classes, in[1]);
    if (!side) return 0;
    at += side;
    if (static_cast<std::size_t>(end - at) < raw) return 0;
    const u8* rest = at;
    at += raw;
    const auto bytes = static_cast<std::size_t>(end - at);
    bool good;
    if (item == 2) {
        good = rans_decode_join(tables, groups, at, bytes, rest, out, n);
    } else if (item == 1) {
        good = rans_decode(tables, groups, at, bytes, out, n);
    } else {
        if (symbols.size() < n) symbols.resize(n);
        good = rans_decode(tables, groups, at, bytes, symbols.data(), n);
        if (good) put_together<u32>(symbols.data(), rest, n, out);
    }
    return good ? kHead + follow : 0;
}

}  // namespace

std::size_t xr_bound(std::size_t bytes, std::size_t planes) {
    return planes * kHead + bytes;
}

std::size_t xr_encode(const u8* in, std::size_t bytes, std::size_t planes, std::size_t item,
                      std::size_t channels, u8* out) {
    const std::size_t plane = bytes / planes;
    std::size_t at = 0;
    for (std::size_t p = 0; p < planes; ++p)
        at += encode_plane(in + plane * p, plane / item, item, channels, out + at);
    return at;
}

bool xr_decode(const u8* in, std::size_t coded, std::size_t planes, std::size_t item,
               std::size_t channels, u8* out, std::size_t bytes) {
    const std::size_t plane = bytes / planes;
    std::size_t at = 0;
    for (std::size_t p = 0; p < planes; ++p) {
        const std::size_t used =
            decode_plane(in + at, coded - at, out + plane * p, plane / item, item, channels);
        if (!used) return false;
        at += used;
    }
    return at == coded;
}

}  // namespace lmcache
