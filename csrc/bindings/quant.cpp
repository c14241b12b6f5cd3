// Python face of the quantising codecs of one plane; contract: the reference in serde/quant.
#include <nanobind/nanobind.h>

#include "lmcache/quant.hpp"
#include "views.hpp"

namespace lmcache {
namespace {

using namespace nb::literals;

struct Call {
    PlaneCode code;
    Element element;
    PlaneShape shape;
    std::size_t plain, coded;

    Call(std::int64_t code_, std::int64_t element_, std::int64_t tokens, std::int64_t heads,
         std::int64_t dim, std::int64_t group)
        : code(static_cast<PlaneCode>(code_)), element(static_cast<Element>(element_)) {
        constexpr std::int64_t most = 1 << 24;
        if (code_ < 1 || code_ > 10 || element_ < 0 || element_ > 2)
            refuse("no code %lld of elements %lld", Length{code_}, Length{element_});
        if (tokens < 1 || heads < 1 || dim < 1 || group < 1 || tokens > most || heads > 65536 ||
            group > most || dim > most)
            refuse("no plane of %lld tokens", Length{tokens});
        shape = {static_cast<std::size_t>(tokens), static_cast<std::size_t>(heads),
                 static_cast<std::size_t>(dim), static_cast<std::size_t>(group)};
        coded = quant_nbytes(code, shape);
        if (!coded) refuse("%lld elements of a head are no multiple of 8 up to 1024", Length{dim});
        plain = shape.rows() * shape.dim * (element == Element::float32 ? 4 : 2);
    }

    void check(const View& raw, const View& made) const {
        if (raw.size() != plain || made.size() != coded)
            refuse("a plane of %lld bytes coded in %lld, got %lld and %lld",
                   static_cast<Length>(plain), static_cast<Length>(coded),
                   static_cast<Length>(raw.size()), static_cast<Length>(made.size()));
    }
};

}  // namespace

void bind_quant(nb::module_& module) {
    module.def(
        "quant_nbytes",
        [](std::int64_t code, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
           std::int64_t group) { return Call(code, 0, tokens, heads, dim, group).coded; },
        "code"_a, "tokens"_a, "heads"_a, "dim"_a, "group"_a,
        nb::sig("def quant_nbytes(code: int, tokens: int, heads: int, dim: int, group: int) -> int"));
    module.def(
        "quant_encode",
        [](std::int64_t code, std::int64_t element, nb::handle source, nb::handle into,
           std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t group) {
            const Call call(code, element, tokens, heads, dim, group);
            const View in(source), out(into, true);
            call.check(in, out);
            const Unlocked unlocked(in.size());
            return quant_encode(call.code, call.element, call.shape, in.data(), out.data());
        },
        "code"_a, "element"_a, "source"_a, "into"_a, "tokens"_a, "heads"_a, "dim"_a, "group"_a,
        nb::sig("def quant_encode(code: int, element: int, source: Buffer, into: Buffer, tokens: int, "
                "heads: int, dim: int, group: int) -> bool"));
    module.def(
        "quant_decode",
        [](std::int64_t code, std::int64_t element, nb::handle source, nb::handle into,
           std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t group) {
            const Call call(code, element, tokens, heads, dim, group);
            const View in(source), out(into, true);
            call.check(out, in);
            const Unlocked unlocked(out.size());
            quant_decode(call.code, call.element, call.shape, in.data(), out.data());
        },
        "code"_a, "element"_a, "source"_a, "into"_a, "tokens"_a, "heads"_a, "dim"_a, "group"_a,
        nb::sig("def quant_decode(code: int, element: int, source: Buffer, into: Buffer, tokens: int, "
                "heads: int, dim: int, group: int) -> None"));
}

}  // namespace lmcache
