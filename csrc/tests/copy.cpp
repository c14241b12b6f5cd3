#include "lmcache/copy.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "check.hpp"

using namespace lmcache;

void test_copy() {
    with_every_set([] {
        constexpr std::size_t sizes[] = {
            0, 1, 63, 64, 200, kStreamFrom - 1, kStreamFrom, kStreamFrom + 77, 9 * kStreamFrom + 5};
        for (const std::size_t n : sizes) {
            const auto data = noise(n + 64);
            for (const std::size_t offset : {0, 1, 63}) {
                for (const unsigned threads : {1U, 3U}) {
                    std::vector<u8> target(n + 130, 0xA5);
                    copy(target.data() + offset, data.data() + 7, n, threads);
                    CHECK(std::equal(target.data() + offset, target.data() + offset + n,
                                     data.data() + 7));
                    CHECK(offset == 0 || target[offset - 1] == 0xA5);
                    CHECK(target[offset + n] == 0xA5);
                }
                std::vector<u8> target(n + 130, 0xA5);
                u8 fused[kDigestBytes], plain[kDigestBytes];
                copy_and_digest(target.data() + offset, data.data() + 3, n, 11, fused);
                digest(data.data() + 3, n, 11, plain);
                CHECK(hex(fused, sizeof fused) == hex(plain, sizeof plain));
                CHECK(std::equal(target.data() + offset, target.data() + offset + n,
                                 data.data() + 3));
                CHECK(target[offset + n] == 0xA5);
            }
        }
        // Overlap in both directions.
        for (const std::size_t n : {std::size_t{500}, kStreamFrom + 9}) {
            for (const bool digested : {false, true}) {
                for (const std::size_t to : {0, 99, 100, 101, 200}) {
                    auto room = noise(n + 200);
                    const std::vector<u8> before(
                        room.begin() + 100, room.begin() + 100 + static_cast<std::ptrdiff_t>(n));
                    u8 out[kDigestBytes];
                    digested ? copy_and_digest(room.data() + to, room.data() + 100, n, 0, out)
                             : copy(room.data() + to, room.data() + 100, n, 2);
                    CHECK(std::equal(before.begin(), before.end(),
                                     room.begin() + static_cast<std::ptrdiff_t>(to)));
                }
            }
        }
    });

    constexpr std::size_t size = std::size_t{70} << 20;
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    auto* bytes = static_cast<u8*>(mapped);
    bytes[size - 1] = 7;
    for (const bool write : {false, true}) {
        CHECK(populate(bytes + 100, size - 100, write, 3) == 0);
        CHECK(bytes[0] == 0 && bytes[size - 1] == 7);
    }
    CHECK(populate(bytes, 0, true, 1) == 0);
    std::vector<unsigned char> resident(size / 4096);
    CHECK(mincore(mapped, size, resident.data()) == 0);
    for (const unsigned char page : resident) CHECK(page & 1);
    CHECK(munmap(mapped, size) == 0);
    CHECK(populate(bytes, size, true, 1) != 0);  // nothing is mapped there any more
}
