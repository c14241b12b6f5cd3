#include <cstring>

#include "check.hpp"

int main(int count, char** arguments) {
    const struct {
        const char* name;
        void (*run)();
    } parts[] = {{"basis", test_basis},
                 {"chain", test_chain},
                 {"codecs", test_codecs},
                 {"copy", test_copy},
                 {"pages", test_pages},
                 {"pool", test_pool},
                 {"quant", test_quant},
                 {"threads", test_threads},
                 {"xxh3", test_xxh3}};
    int ran = 0;
    for (const auto& part : parts) {
        if (count > 1 && std::strcmp(arguments[1], part.name) != 0) continue;
        part.run();
        ++ran;
        std::printf("%s: good, best instruction set %s\n", part.name,
                    lmcache::available()[0]->name);
    }
    return ran ? 0 : 2;
}
