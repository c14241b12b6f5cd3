#include "lmcache/xxh3.hpp"

#include <algorithm>

#include "check.hpp"

using namespace lmcache;

namespace {

// Made with the xxHash library itself (python-xxhash, xxh3_128_hexdigest) over noise(n).
const struct {
    std::size_t n;
    u64 seed;
    const char* expected;
} golden[] = {
    {0, 0x0U, "99aa06d3014798d86001c324468d497f"},
    {0, 0x9e3779b97f4a7c15U, "d142977a2cca554b4ca5176998171787"},
    {1, 0x0U, "a6cd5e9392000f6ac44bdff4074eecdb"},
    {1, 0x9e3779b97f4a7c15U, "e366b8c99a31df50062b185e4e01441a"},
    {2, 0x0U, "59264f999f5b71511ca5cfa6a6d57dc2"},
    {2, 0x9e3779b97f4a7c15U, "d63543b0064fdff5e0bd22ab7317af96"},
    {3, 0x0U, "95c705060a313bf8a1c4a8259b827291"},
    {3, 0x9e3779b97f4a7c15U, "3c583043ae3ec80e2c0f411a2c50b127"},
    {4, 0x0U, "afbf64f9281b8de2fde8d93ae8794d8e"},
    {4, 0x9e3779b97f4a7c15U, "3c53fd28a4bcda944a10995d638a994e"},
    {7, 0x0U, "c64dca5a80a280cb75c20f7ea6fdec78"},
    {7, 0x9e3779b97f4a7c15U, "d1ec5de817129a2d3e797dad82e1a712"},
    {8, 0x0U, "2761698c33953c430234362aaf47b71a"},
    {8, 0x9e3779b97f4a7c15U, "9d0c98607e7f886eac8ad9e866a0b8c8"},
    {9, 0x0U, "0d39db6431d37a74895c8a562da51412"},
    {9, 0x9e3779b97f4a7c15U, "cc06703115906de99ceeec552c902473"},
    {15, 0x0U, "25bce72548003f03ebab99da883ac189"},
    {15, 0x9e3779b97f4a7c15U, "550fcd6de87d31844a819cd58153301e"},
    {16, 0x0U, "29be75b0bbbb5284aafffcec5df2cb27"},
    {16, 0x9e3779b97f4a7c15U, "58c47d96b734dfa24184fcb27ec83364"},
    {17, 0x0U, "db7e8f77961e47fd878751509ecfdb8b"},
    {17, 0x9e3779b97f4a7c15U, "046dc26326b17f233c579f4313655434"},
    {32, 0x0U, "3e97336e6cbb6ee0de94574d7a589440"},
    {32, 0x9e3779b97f4a7c15U, "4f53b32cd772eb7cc600d9d70a3153df"},
    {33, 0x0U, "3411cfe692c2e51ee2928442749dbe83"},
    {33, 0x9e3779b97f4a7c15U, "1d587e2c3cc5d57709e490b154793257"},
    {64, 0x0U, "492893316886558766fa129223be93a5"},
    {64, 0x9e3779b97f4a7c15U, "86b32032544f10a8a4245b47ed2a7e35"},
    {96, 0x0U, "e83e939b9571947cb9de9a9696c420fc"},
    {96, 0x9e3779b97f4a7c15U, "fdff14438d52ca205ca68551efa57780"},
    {128, 0x0U, "ba44fd018231af4cbbe087d879edcc78"},
    {128, 0x9e3779b97f4a7c15U, "b3ce7d70100aecb2e5d58a12ecbbc415"},
    {129, 0x0U, "522c922743fd67f1b8075934107218e5"},
    {129, 0x9e3779b97f4a7c15U, "ffbad2a7b15c96a4a161c7ab356d129a"},
    {159, 0x0U, "b8d84928ce30df2ad19ad5c36f243195"},
    {159, 0x9e3779b97f4a7c15U, "d80e4a25bda023fc9705dc6a3846b329"},
    {160, 0x0U, "b5514c067fd629180e08f445e497507a"},
    {160, 0x9e3779b97f4a7c15U, "39b31cd6ac6ba1099c751b9997374f58"},
    {191, 0x0U, "d0dbcc2422b44f19480841c9774e7cb1"},
    {191, 0x9e3779b97f4a7c15U, "40aa7cd20e98df2c0b7739d5e8f84307"},
    {192, 0x0U, "e56ca7e913690426a2ce6a625bea6b31"},
    {192, 0x9e3779b97f4a7c15U, "80e8624606b0df0f0fcf2dcc121a9607"},
    {239, 0x0U, "c1e42329e230196f964c0b96c0e4e615"},
    {239, 0x9e3779b97f4a7c15U, "a39f7207feb2dc8676772e2c08b6544f"},
    {240, 0x0U, "4f49ccc8526aa7ad407883ea5ef95b9a"},
    {240, 0x9e3779b97f4a7c15U, "3eea9e0467dc0187b97819e2dceb8523"},
    {241, 0x0U, "50b62ee1ee6455a7bc424a2c480dd281"},
    {241, 0x9e3779b97f4a7c15U, "0f899b32ec0df0d9dbcb360abf2ca85d"},
    {255, 0x0U, "13c4fb2eb194824f155baa5891f7606f"},
    {255, 0x9e3779b97f4a7c15U, "cc390fa56a92f68d6b281c5f1253f92b"},
    {256, 0x0U, "20d618055259b36c2d040b1ab40f0d78"},
    {256, 0x9e3779b97f4a7c15U, "1e88035cabaa3fb1c9ff3e475003261f"},
    {257, 0x0U, "06d2f2dce7891e45d0515fbec69efb50"},
    {257, 0x9e3779b97f4a7c15U, "e55733493dd4d068987dfd4f1d950785"},
    {512, 0x0U, "17d1143c4bfb7ce017ec4809d1a9ad43"},
    {512, 0x9e3779b97f4a7c15U, "a203fbd68e19f6470bd264522bb7f27c"},
    {1023, 0x0U, "d34ef4f411b9a93e3071307bafa2f8f4"},
    {1023, 0x9e3779b97f4a7c15U, "7c3a063d76550e3f98a3eb21a6568011"},
    {1024, 0x0U, "53bd178b75ab292e1fd15e7d36f5e1bc"},
    {1024, 0x9e3779b97f4a7c15U, "cf4085274abbf647249cd8f9ad0ea839"},
    {1025, 0x0U, "d1ad5f4a3cce4374fe08e5a874d23fd2"},
    {1025, 0x9e3779b97f4a7c15U, "d70f8dc91c37b48a455ead76fa138d0a"},
    {1088, 0x0U, "9c1e8a4061056e7d0ac7cf3a6009bab5"},
    {1088, 0x9e3779b97f4a7c15U, "9cc2798246fb2b0cdac4ff4aacf33331"},
    {2048, 0x0U, "2e141090da5502aa81ec4a6a9ee23d55"},
    {2048, 0x9e3779b97f4a7c15U, "f4649ce72cc55b54df66bcf56366e0fb"},
    {2049, 0x0U, "3b45eb7c64d498329156a1fd2d1a8c37"},
    {2049, 0x9e3779b97f4a7c15U, "8c438eea4df20339031bfb503cb30a7e"},
    {5000, 0x0U, "971956c2a9ecb28a853377ef13cec7bd"},
    {5000, 0x9e3779b97f4a7c15U, "4b0d2828d6a1258b122e66ec07798497"},
    {100003, 0x0U, "19bacb7bf95a97ea25ba638a3c66d20f"},
    {100003, 0x9e3779b97f4a7c15U, "a2790be05a55aecd65679fa500f43e0e"},
};

std::string digest_of(const std::vector<u8>& data, u64 seed) {
    u8 out[kDigestBytes];
    digest(data.data(), data.size(), seed, out);
    return hex(out, sizeof out);
}

// The digest in pieces of the given sizes, in turn, fused with a copy.
std::string in_pieces(const std::vector<u8>& data, u64 seed, std::vector<std::size_t> sizes,
                      std::vector<u8>& target, Store store) {
    Xxh3 state(data.size(), seed);
    for (std::size_t at = 0, turn = 0; at < data.size(); ++turn) {
        const std::size_t step = std::min(sizes[turn % sizes.size()], data.size() - at);
        state.move(target.data() + at, data.data() + at, Runs{step}, store);
        at += step;
    }
    fence();
    u8 out[kDigestBytes];
    state.finish(out);
    return hex(out, sizeof out);
}

}  // namespace

void test_xxh3() {
    with_every_set([] {
        for (const auto& row : golden) {
            const auto data = noise(row.n);
            CHECK(digest_of(data, row.seed) == row.expected);
            for (const Store store : {Store::none, Store::plain, Store::stream}) {
                for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{1},
                                                              {64},
                                                              {128, 64},
                                                              {63, 65},
                                                              {7, 1000, 64},
                                                              {1024}}) {
                    std::vector<u8> target(row.n, 0xA5);
                    CHECK(in_pieces(data, row.seed, sizes, target, store) == row.expected);
                    CHECK(target == (store == Store::none ? std::vector<u8>(row.n, 0xA5) : data));
                }
            }
        }
        // A strided source gives the digest of its runs joined, wherever the last line falls.
        for (std::size_t run : {64, 128, 72, 1024}) {
            for (std::size_t inner : {1, 3}) {
                for (std::size_t outer : {1, 2, 5}) {
                    const auto memory = noise(outer * inner * (run + 24) + 8, 99);
                    std::vector<u8> joined;
                    for (std::size_t i = 0; i < outer * inner; ++i) {
                        const u8* from = memory.data() + i * (run + 24);
                        joined.insert(joined.end(), from, from + run);
                    }
                    const auto step = static_cast<std::ptrdiff_t>(run + 24),
                               width = static_cast<std::ptrdiff_t>(run);
                    const auto many = static_cast<std::ptrdiff_t>(inner);
                    Xxh3 state(joined.size(), 5);
                    std::vector<u8> target(joined.size());
                    state.move(target.data(), memory.data(),
                               Runs{.run = run,
                                    .inner = inner,
                                    .inner_src = step,
                                    .inner_dst = width,
                                    .outer = outer,
                                    .outer_src = step * many,
                                    .outer_dst = width * many},
                               Store::stream);
                    fence();
                    u8 out[kDigestBytes];
                    state.finish(out);
                    CHECK(hex(out, sizeof out) == digest_of(joined, 5));
                    CHECK(target == joined);
                }
            }
        }
    });
}
