#include "lmcache/pages.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "check.hpp"

using namespace lmcache;

namespace {

// Engine memory of a few layers with planes side by side, and its description.
struct Engine {
    std::int64_t heads, states, cell, blocks, layers;
    bool rows, heads_first;
    std::vector<u8> memory;
    std::vector<Plane> planes;
    std::vector<std::int64_t> starts;

    Engine(std::int64_t h, std::int64_t n, std::int64_t c, std::int64_t b, bool r, bool hf,
           std::int64_t padding)
        : heads(h), states(n), cell(c), blocks(b), layers(3), rows(r), heads_first(hf) {
        const std::int64_t pair = 2 * cell;
        const std::int64_t head_stride = heads_first ? states * pair : pair;
        const std::int64_t state_stride = heads_first ? pair : heads * pair;
        const std::int64_t block_stride = heads * states * pair + padding;
        memory = noise(static_cast<std::size_t>(layers * blocks * block_stride));
        for (std::int64_t layer = 0; layer < layers; ++layer) {
            starts.push_back(static_cast<std::int64_t>(planes.size()));
            for (std::int64_t plane = 0; plane < 2; ++plane) {
                const u8* base = memory.data() + layer * blocks * block_stride + plane * cell;
                planes.push_back({reinterpret_cast<std::int64_t>(base), heads, cell, block_stride,
                                  state_stride, head_stride, rows,
                                  static_cast<std::int64_t>(planes.size()) * heads * cell});
            }
        }
        starts.push_back(static_cast<std::int64_t>(planes.size()));
    }

    PlaneTable table() const { return {planes, starts, states, blocks}; }

    // Addresses of the cells of a selection, in payload order.
    std::vector<u8*> cells(const Selection& part) const {
        std::vector<u8*> found;
        for (const Plane& plane : planes) {
            const auto add = [&](std::int64_t unit, std::int64_t head) {
                found.push_back(reinterpret_cast<u8*>(
                    plane.pointer + part.ids[unit / states] * plane.block_stride +
                    unit % states * plane.state_stride + head * plane.head_stride));
            };
            const std::int64_t end = part.first + part.count;
            if (rows) {
                for (std::int64_t unit = part.first; unit < end; ++unit)
                    for (std::int64_t head = 0; head < heads; ++head) add(unit, head);
                continue;
            }
            for (std::int64_t block = part.first; block < end; block += states)
                for (std::int64_t head = 0; head < heads; ++head)
                    for (std::int64_t state = 0; state < states; ++state) add(block + state, head);
        }
        return found;
    }
};

void both_ways(Engine& engine, const Selection& part, std::size_t offset) {
    const PlaneTable table = engine.table();
    const auto cell = static_cast<std::size_t>(engine.cell);
    const auto cells = engine.cells(part);
    std::vector<u8> expected;
    for (const u8* from : cells) expected.insert(expected.end(), from, from + cell);
    CHECK(expected.size() == static_cast<std::size_t>(table.unit() * part.count));

    std::vector<u8> room(expected.size() + 192, 0xA5), digests(table.segments() * kDigestBytes);
    u8* payload = room.data() + (64 - reinterpret_cast<std::uintptr_t>(room.data()) % 64) + offset;
    gather(table, part, payload, 0, nullptr);
    CHECK(std::equal(expected.begin(), expected.end(), payload));
    std::fill(payload, payload + expected.size(), u8{0});
    gather(table, part, payload, 21, digests.data());
    CHECK(std::equal(expected.begin(), expected.end(), payload));
    CHECK(payload[expected.size()] == 0xA5 && payload[-1] == 0xA5);

    const std::size_t share = expected.size() / table.segments();
    for (std::size_t i = 0; i < table.segments(); ++i) {
        u8 plain[kDigestBytes];
        digest(expected.data() + i * share, share, 21, plain);
        CHECK(std::equal(plain, plain + kDigestBytes, digests.data() + i * kDigestBytes));
    }

    std::vector<u8> fresh(engine.memory.size(), 0x5A);
    for (std::size_t i = 0; i < cells.size(); ++i) {
        std::copy_n(expected.data() + i * cell, cell,
                    fresh.data() + (cells[i] - engine.memory.data()));
    }
    for (const bool verified : {false, true}) {
        std::fill(engine.memory.begin(), engine.memory.end(), u8{0x5A});
        CHECK(scatter(table, part, payload, 21, verified ? digests.data() : nullptr) == -1);
        CHECK(engine.memory == fresh);
    }
    if (share == 0) return;
    for (std::size_t i = table.segments(); i-- > 0;) {
        payload[i * share + share / 2] ^= 4;  // later segments stay damaged: the first one counts
        CHECK(scatter(table, part, payload, 21, digests.data()) == static_cast<std::int64_t>(i));
    }
}

}  // namespace

void test_pages() {
    with_every_set([] {
        std::mt19937 random(7);
        const auto below = [&](std::int64_t n) {
            return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random);
        };
        for (int round = 0; round < 400; ++round) {
            constexpr std::int64_t cells[] = {1, 8, 64, 128, 132, 576};
            const bool rows = below(2), large = round % 40 == 0;
            Engine engine(1 + below(4), large ? 16 : 1 + below(5),
                          large ? cells[2 + below(4)] : cells[below(6)], large ? 60 : 1 + below(6),
                          rows, below(2), 64 * below(2) + below(2));
            std::vector<std::int64_t> ids(static_cast<std::size_t>(engine.blocks));
            std::iota(ids.begin(), ids.end(), 0);
            std::shuffle(ids.begin(), ids.end(), random);
            const std::int64_t unit = rows ? 1 : engine.states,
                               all = engine.blocks * engine.states / unit;
            const std::int64_t first = large ? 0 : below(all + 1),
                               count = large ? all : below(all - first + 1);
            const Selection part{ids.data(), first * unit, count * unit,
                                 static_cast<unsigned>(1 + below(3))};
            both_ways(engine, part, static_cast<std::size_t>(below(2) * (1 + below(64))));
        }
    });
    const std::vector<std::int64_t> starts = {0};
    const PlaneTable empty{{}, starts, 1, 0};
    gather(empty, {nullptr, 0, 0, 2}, nullptr, 0, nullptr);
    CHECK(scatter(empty, {nullptr, 0, 0, 2}, nullptr, 0, nullptr) == -1);
}
