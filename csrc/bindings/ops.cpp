// Python face of the library. Contract and documentation: lmcache_core/ops.py, class Reference.
//
// Everything is checked here, before the first byte moves; the library below trusts its callers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <string>
#include <string_view>

#include "lmcache/chain.hpp"
#include "lmcache/copy.hpp"
#include "lmcache/pages.hpp"
#include "views.hpp"

using namespace lmcache;
using namespace nb::literals;

namespace {

unsigned thread_count(std::int64_t threads) {
    if (threads < 1) refuse("threads is at least 1, got %lld", Length{threads});
    return static_cast<unsigned>(std::min<std::int64_t>(threads, 1024));
}

u64 seed_value(nb::handle seed) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(seed.ptr());
    if (value == ~0ULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw nb::python_error();
        PyErr_Clear();
        throw nb::value_error("seed is outside [0, 2**64)");
    }
    return value;
}

// A bytes object to be filled before anybody else sees it.
nb::bytes new_bytes(std::size_t n, u8** data) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n));
    if (!made) throw nb::python_error();
    *data = reinterpret_cast<u8*>(PyBytes_AsString(made));
    return nb::steal<nb::bytes>(made);
}

void check_pair(const View& dst, const View& src) {
    if (dst.size() == src.size()) return;
    refuse("cannot copy %lld bytes over %lld", static_cast<Length>(src.size()),
           static_cast<Length>(dst.size()));
}

void py_copy(nb::handle dst, nb::handle src, std::int64_t threads) {
    const unsigned many = thread_count(threads);
    const View target(dst, true), source(src);
    check_pair(target, source);
    const Unlocked unlocked(source.size());
    copy(target.data(), source.data(), source.size(), many);
}

nb::bytes py_digest(nb::handle data, nb::handle seed) {
    const View source(data);
    const u64 key = seed_value(seed);
    u8* out;
    nb::bytes result = new_bytes(kDigestBytes, &out);
    const Unlocked unlocked(source.size());
    digest(source.data(), source.size(), key, out);
    return result;
}

nb::bytes py_copy_and_digest(nb::handle dst, nb::handle src, nb::handle seed) {
    const View target(dst, true), source(src);
    check_pair(target, source);
    const u64 key = seed_value(seed);
    u8* out;
    nb::bytes result = new_bytes(kDigestBytes, &out);
    const Unlocked unlocked(source.size());
    copy_and_digest(target.data(), source.data(), source.size(), key, out);
    return result;
}

nb::bytes py_chain(nb::handle root, nb::handle tokens, std::int64_t chunk_tokens) {
    const View start(root), ids(tokens);
    if ((ids.itemsize() != 1 && ids.itemsize() != 4) || ids.size() % 4) {
        refuse("token ids are packed uint32, got %lld bytes in items of %lld",
               static_cast<Length>(ids.size()), static_cast<Length>(ids.itemsize()));
    }
    if (start.size() != kChainBytes || chunk_tokens < 1 || chunk_tokens > 0xFFFFFFFFLL) {
        refuse("chain of %lld-token chunks from a root of %lld bytes", Length{chunk_tokens},
               static_cast<Length>(start.size()));
    }
    const auto width = static_cast<u32>(chunk_tokens);
    const std::size_t chunks = ids.size() / (std::size_t{4} * width);
    u8* out;
    nb::bytes result = new_bytes(chunks * kChainBytes, &out);
    const Unlocked unlocked(ids.size());
    chain(start.data(), ids.data(), chunks, width, out);
    return result;
}

nb::bytes py_pack_tokens(nb::handle ids) {
    PyObject* list = ids.ptr();
    nb::object made;
    if (!PyList_Check(list)) {
        made = nb::steal(PySequence_List(list));
        if (!made.is_valid()) throw nb::python_error();
        list = made.ptr();
    }
    const Py_ssize_t count = PyList_Size(list);
    u8* out;
    nb::bytes result = new_bytes(static_cast<std::size_t>(count) * 4, &out);
    for (Py_ssize_t i = 0; i < count; ++i) {
        // An id may run Python code (__index__) that changes the list under us: items are looked
        // up with a bounds check, and held.
        PyObject* item = PyList_GetItem(list, i);
        if (!item) throw nb::python_error();
        unsigned long long value;
        if (PyLong_Check(item)) {
            value = PyLong_AsUnsignedLongLong(item);
        } else {
            const nb::object held = nb::borrow(item), index = nb::steal(PyNumber_Index(held.ptr()));
            if (!index.is_valid()) throw nb::python_error();
            value = PyLong_AsUnsignedLongLong(index.ptr());
        }
        if (value > 0xFFFFFFFFULL) {
            PyErr_Clear();
            const nb::object now = nb::steal(PySequence_GetItem(list, i));
            if (!now.is_valid()) throw nb::python_error();
            const std::string text = nb::str(now).c_str();
            refuse("token id %s at position %lld is outside [0, 2**32)", text.c_str(),
                   static_cast<Length>(i));
        }
        for (unsigned byte = 0; byte < 4; ++byte)
            out[4 * i + byte] = static_cast<u8>(value >> (8 * byte));
    }
    return result;
}

// The flattened form that lmcache_core.ops.PlaneTable made of itself.
class Table {
public:
    explicit Table(nb::handle table) : packed_(nb::getattr(table, "packed")) {
        const auto* words = reinterpret_cast<const std::int64_t*>(packed_.data());
        const std::size_t count = packed_.size() / 8, fixed = 4;
        const auto planes = count < fixed ? 0 : static_cast<std::size_t>(words[0]);
        const auto segments = count < fixed ? 0 : static_cast<std::size_t>(words[1]);
        if (count != fixed + 8 * planes + segments + 1)
            refuse("not a plane table: %lld words", static_cast<Length>(count));
        table_ = {.planes = {reinterpret_cast<const Plane*>(words + fixed), planes},
                  .starts = {words + fixed + 8 * planes, segments + 1},
                  .states = words[2],
                  .blocks = words[3]};
    }
    const PlaneTable& operator*() const { return table_; }

private:
    View packed_;
    PlaneTable table_;
};

Selection check(const PlaneTable& table, const View& ids, std::int64_t first, std::int64_t count,
                const View& payload, std::int64_t threads) {
    const unsigned many = thread_count(threads);
    const std::string_view code = ids.format();
    const bool integers = !code.empty() && code.find_first_not_of("@=<qln") == code.npos;
    if (ids.itemsize() != 8 || !integers)
        refuse("block ids are int64, got items of format '%s'", code.data());
    const auto listed = static_cast<std::int64_t>(ids.size() / 8);
    const Length begin = first,
                 end = static_cast<Length>(static_cast<u64>(first) + static_cast<u64>(count));
    if (first < 0 || count < 0 || count > listed * table.states ||
        first > listed * table.states - count) {
        refuse("units [%lld, %lld) are not within the %lld listed", begin, end,
               Length{listed * table.states});
    }
    const bool cut = first % table.states || count % table.states;
    const auto page = [](const Plane& plane) { return plane.rows == 0; };
    if (cut && std::any_of(table.planes.begin(), table.planes.end(), page)) {
        refuse("units [%lld, %lld) cut a block of %lld", begin, end, Length{table.states});
    }
    const auto* list = reinterpret_cast<const std::int64_t*>(ids.data());
    for (std::int64_t i = first / table.states; count && i * table.states < first + count; ++i) {
        if (list[i] < 0 || list[i] >= table.blocks) {
            refuse("block %lld is outside [0, %lld)", Length{list[i]}, Length{table.blocks});
        }
    }
    const std::int64_t bytes = table.unit() * count;
    if (static_cast<std::size_t>(bytes) != payload.size()) {
        refuse("payload of %lld units has %lld bytes, not %lld", Length{count}, Length{bytes},
               static_cast<Length>(payload.size()));
    }
    return {.ids = list, .first = first, .count = count, .threads = many};
}

nb::object py_gather(nb::handle table, nb::handle block_ids, std::int64_t first, std::int64_t count,
                     nb::handle dst, nb::handle seed, std::int64_t threads) {
    const Table planes(table);
    const View ids(block_ids), target(dst, true);
    const Selection part = check(*planes, ids, first, count, target, threads);
    const bool sealed = !seed.is_none();
    const u64 key = sealed ? seed_value(seed) : 0;
    u8* out = nullptr;
    nb::object result = nb::none();
    if (sealed) result = new_bytes((*planes).segments() * kDigestBytes, &out);
    const Unlocked unlocked(target.size());
    gather(*planes, part, target.data(), key, out);
    return result;
}

std::int64_t py_scatter(nb::handle table, nb::handle block_ids, std::int64_t first,
                        std::int64_t count, nb::handle src, nb::handle seed, nb::handle digests,
                        std::int64_t threads) {
    const Table planes(table);
    const View ids(block_ids), source(src);
    const Selection part = check(*planes, ids, first, count, source, threads);
    if (seed.is_none() != digests.is_none())
        refuse("scatter verifies with both seed and digests, or with neither");
    const u64 key = seed.is_none() ? 0 : seed_value(seed);
    std::optional<View> expected;
    if (!digests.is_none()) {
        expected.emplace(digests);
        const std::size_t wanted = (*planes).segments() * kDigestBytes;
        if (expected->size() != wanted) {
            refuse("%lld digest bytes, expected %lld", static_cast<Length>(expected->size()),
                   static_cast<Length>(wanted));
        }
    }
    const Unlocked unlocked(source.size());
    return scatter(*planes, part, source.data(), key, expected ? expected->data() : nullptr);
}

void py_populate(nb::handle view, std::int64_t threads) {
    const unsigned many = thread_count(threads);
    const View memory(view);
    int code;
    {
        const Unlocked unlocked(kUnlockFrom);
        code = populate(memory.data(), memory.size(), !memory.readonly(), many);
    }
    if (code == 0) return;
    errno = code;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

}  // namespace

NB_MODULE(ops, module) {
    module.attr("INSTRUCTIONS") = kernels().name;
    nb::list sets;
    for (const Kernels* set : available()) sets.append(set->name);
    module.attr("INSTRUCTION_SETS") = nb::tuple(sets);
    module.def(
        "select",
        [](const std::string& name) {
            if (!select(name.c_str()))
                refuse("instruction set '%s' does not run here", name.c_str());
        },
        "name"_a, nb::sig("def select(name: str) -> None"),
        "Use one of INSTRUCTION_SETS from now on; for tests and benchmarks.");

    module.def("copy", py_copy, "dst"_a, "src"_a, nb::kw_only(), "threads"_a = 1,
               nb::sig("def copy(dst: Buffer, src: Buffer, *, threads: int = 1) -> None"));
    module.def("digest", py_digest, "data"_a, "seed"_a,
               nb::sig("def digest(data: Buffer, seed: int) -> bytes"));
    module.def("copy_and_digest", py_copy_and_digest, "dst"_a, "src"_a, "seed"_a,
               nb::sig("def copy_and_digest(dst: Buffer, src: Buffer, seed: int) -> bytes"));
    module.def("chain", py_chain, "root"_a, "tokens"_a, "chunk_tokens"_a,
               nb::sig("def chain(root: Buffer, tokens: Buffer, chunk_tokens: int) -> bytes"));
    module.def("pack_tokens", py_pack_tokens, "ids"_a,
               nb::sig("def pack_tokens(ids: Sequence[int]) -> bytes"));
    module.def("gather", py_gather, "table"_a, "block_ids"_a, "first"_a, "count"_a, "dst"_a,
               nb::kw_only(), "seed"_a.none() = nb::none(), "threads"_a = 1,
               nb::sig("def gather(table: PlaneTable, block_ids: Buffer, first: int, count: int, "
                       "dst: Buffer, *, "
                       "seed: int | None = None, threads: int = 1) -> bytes | None"));
    module.def(
        "scatter", py_scatter, "table"_a, "block_ids"_a, "first"_a, "count"_a, "src"_a,
        nb::kw_only(), "seed"_a.none() = nb::none(), "digests"_a.none() = nb::none(),
        "threads"_a = 1,
        nb::sig(
            "def scatter(table: PlaneTable, block_ids: Buffer, first: int, count: int, src: "
            "Buffer, *, "
            "seed: int | None = None, digests: Buffer | None = None, threads: int = 1) -> int"));
    module.def("populate", py_populate, "view"_a, nb::kw_only(), "threads"_a = 1,
               nb::sig("def populate(view: Buffer, *, threads: int = 1) -> None"));
    bind_basis(module);
    bind_codecs(module);
    bind_quant(module);
}
