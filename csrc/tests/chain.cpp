#include "lmcache/chain.hpp"

#include <algorithm>

#include "check.hpp"

using namespace lmcache;

namespace {

std::string sha256_of(const u8* data, std::size_t n, std::size_t step) {
    Sha256 hash;
    for (std::size_t at = 0; at < n; at += step) hash.update(data + at, std::min(step, n - at));
    u8 out[kChainBytes];
    hash.finish(out);
    return hex(out, sizeof out);
}

}  // namespace

void test_chain() {
    with_every_set([] {
        const u8 abc[] = {'a', 'b', 'c'};
        CHECK(sha256_of(abc, 3, 3) ==
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        CHECK(sha256_of(abc, 0, 1) ==
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        const auto data = noise(100003);
        for (std::size_t step : {1, 63, 64, 65, 1000, 100003}) {
            CHECK(sha256_of(data.data(), data.size(), step) ==
                  "c06f53971c7943fafd45b744804b7c7480642a5f81fdac2c2400537dcbe9c962");
        }
        // All lengths around the padding, against the portable version.
        for (std::size_t n = 0; n < 300; ++n) {
            const std::string here = sha256_of(data.data(), n, 300);
            const std::string used = kernels().name;
            CHECK(select("scalar"));
            CHECK(here == sha256_of(data.data(), n, 7));
            CHECK(select(used.c_str()));
        }
        // Made with hashlib: eight full chunks of 37 ids; the rest of the ids is left alone.
        const auto tokens = noise(4 * 300);
        const u8 root[kChainBytes] = {};
        std::vector<u8> out(8 * kChainBytes);
        chain(root, tokens.data(), 8, 37, out.data());
        CHECK(hex(out.data(), kChainBytes) ==
              "86cd0745038d6c1799d6d25805e07c5dceabc85c42dc08d6778229cd89a8a514");
        CHECK(hex(out.data() + 7 * kChainBytes, kChainBytes) ==
              "f44d4274b748c3f07577d7795d902e0e0125ba267f5913d76cd4d3e1f4e68ebc");
        chain(root, tokens.data(), 0, 256, nullptr);
    });
}
