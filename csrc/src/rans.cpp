#include <algorithm>
#include <cstring>

#include "lmcache/codecs.hpp"

namespace lmcache {
namespace {

u32 load16(const u8* at) {
    std::uint16_t word;
    std::memcpy(&word, at, 2);
    return word;
}

void store16(u8* at, u32 value) {
    const auto word = static_cast<std::uint16_t>(value);
    std::memcpy(at, &word, 2);
}

// Fills the class of every position of a whole number of periods that is a multiple of the lanes.
const u32* bases_of(Classes classes, unsigned bits, std::size_t* period) {
    thread_local std::vector<u32> bases;
    std::size_t whole = classes.period;
    while (whole % kLanes) whole += classes.period;
    if (bases.size() < whole) bases.resize(whole);
    for (std::size_t i = 0; i < whole; ++i)
        bases[i] = static_cast<u32>(classes.of[i % classes.period]) << bits;
    *period = whole;
    return bases.data();
}

bool decode(const RansTables& tables, Classes classes, const u8* in, std::size_t bytes,
            const u8* rest, u8* out, std::size_t n) {
    if (bytes < 4 * kLanes) return false;
    detail::RansState state;
    std::memcpy(state.x, in, 4 * kLanes);
    state.next = in + 4 * kLanes;
    state.end = in + bytes;
    state.done = 0;
    std::size_t period;
    const u32* bases = bases_of(classes, tables.bits, &period);
    if (detail::codecs().rans) detail::codecs().rans(state, tables, bases, period, rest, out, n);
    const u32 mask = (u32{1} << tables.bits) - 1;
    const u32* slots = tables.slots.data();
    std::size_t at = state.done % period;
    for (std::size_t i = state.done; i < n; ++i) {
        u32& x = state.x[i % kLanes];
        const u32 slot = slots[bases[at] + (x & mask)];
        if (++at == period) at = 0;
        x = ((slot >> 12 & 0xFFF) + 1) * (x >> tables.bits) + (slot & 0xFFF);
        if (x < kRansLow) {
            if (state.next + 2 > state.end) return false;
            x = x << 16 | load16(state.next);
            state.next += 2;
        }
        const u32 symbol = slot >> 24;
        if (rest) {
            const u32 word = symbol << 8 | rest[i];
            store16(out + 2 * i, word >> 1 | word << 15);
        } else {
            out[i] = static_cast<u8>(symbol);
        }
    }
    return state.next == state.end &&
           std::all_of(state.x, state.x + kLanes, [](u32 x) { return x == kRansLow; });
}

}  // namespace

bool RansTables::build(const std::uint16_t* freqs, std::size_t count, unsigned width) {
    if (width < 1 || width > kRansBitsMost || count < 1 || count > 256) return false;
    bits = width;
    classes = count;
    slots.resize(count << bits);
    symbols.resize(count * 256);
    for (std::size_t c = 0; c < count; ++c) {
        u32 start = 0;
        for (u32 s = 0; s < 256; ++s) {
            const u32 freq = freqs[256 * c + s];
            if (freq > (u32{1} << bits) - start) return false;
            symbols[256 * c + s] = freq << 16 | start;
            const u32 head = s << 24 | (freq - 1) << 12;
            u32* to = slots.data() + (c << bits) + start;
            for (u32 i = 0; i < freq; ++i) to[i] = head | i;
            start += freq;
        }
        if (start != u32{1} << bits) return false;
    }
    return true;
}

std::size_t rans_encode(const RansTables& tables, Classes classes, const u8* symbols, std::size_t n,
                        u8* out, std::size_t room) {
    u32 x[kLanes];
    std::fill(x, x + kLanes, kRansLow);
    const unsigned bits = tables.bits, above = 32 - bits;
    std::size_t period;
    const u32* bases = bases_of(classes, 8, &period);
    u8* top = out + room;
    const auto kernel = detail::codecs().rans_encode;
    const std::size_t whole_steps = kernel ? n / kLanes * kLanes : 0;
    std::size_t at = n % period;
    for (std::size_t i = n; i-- > whole_steps;) {
        at = (at ? at : period) - 1;
        u32& state = x[i % kLanes];
        const u32 entry = tables.symbols[bases[at] + symbols[i]], freq = entry >> 16;
        if (freq == 0) return 0;
        if (state >> above >= freq) {
            top -= 2;
            store16(top, state);
            state >>= 16;
        }
        const u32 whole = state / freq;
        state = (whole << bits) + (state - whole * freq) + (entry & 0xFFFF);
    }
    if (whole_steps) top = kernel(x, tables, bases, period, symbols, whole_steps, top);
    if (!top) return 0;
    const auto words = static_cast<std::size_t>(out + room - top);
    std::memmove(out + 4 * kLanes, top, words);
    std::memcpy(out, x, 4 * kLanes);
    return 4 * kLanes + words;
}

bool rans_decode(const RansTables& tables, Classes classes, const u8* in, std::size_t bytes,
                 u8* symbols, std::size_t n) {
    return decode(tables, classes, in, bytes, nullptr, symbols, n);
}

bool rans_decode_join(const RansTables& tables, Classes classes, const u8* in, std::size_t bytes,
                      const u8* rest, u8* out, std::size_t n) {
    return decode(tables, classes, in, bytes, rest, out, n);
}

void rans_normalise(u32 counts[256], unsigned bits) {
    u64 total = 0;
    for (unsigned s = 0; s < 256; ++s) total += counts[s];
    const u32 goal = u32{1} << bits;
    if (total == 0) {
        counts[0] = goal;
        return;
    }
    u32 sum = 0;
    for (unsigned s = 0; s < 256; ++s) {
        if (!counts[s]) continue;
        counts[s] = std::max<u32>(1, static_cast<u32>(counts[s] * u64{goal} / total));
        sum += counts[s];
    }
    // Take what is too much from the largest, which feel it least; give them what is missing.
    while (sum != goal) {
        u32* largest = std::max_element(counts, counts + 256);
        const u32 change = sum < goal ? goal - sum : std::min(sum - goal, *largest / 2);
        *largest = sum < goal ? *largest + change : *largest - change;
        sum = sum < goal ? goal : sum - change;
    }
}

}  // namespace lmcache
