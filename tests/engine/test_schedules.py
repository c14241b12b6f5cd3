"""Random schedules of several requests against the laws of a request: legal offers, right bytes, nothing left held."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_core.engine import Request, State
from lmcache_core.identity import Group
from tests.engine.rig import ALL, CHUNK, POINT, TWO, WINDOW, Memory, World

PROMPTS = st.builds(
    lambda length, at: [token if token != at else 99 for token in range(length)],
    st.one_of(st.integers(0, 22), st.sampled_from([16, 20, 21])),
    st.one_of(st.none(), st.none(), st.integers(0, 21)),
)
"""Beginnings of one text, some with one token changed."""
OPTIONS = st.fixed_dictionaries({
    "save_partial": st.booleans(),
    "min_retrieve_tokens": st.sampled_from([0, 0, 5]),
    "min_store_tokens": st.sampled_from([0, 0, 9]),
    "max_tokens_per_load": st.sampled_from([None, None, 10]),
})  # fmt: skip


class Running:
    """What the engine knows of one of its requests.

    Attributes:
        tokens: all of them so far.
        good: leading tokens whose KV is right in memory.
        answer: what a lookup answered, and to which ``local``.
    """

    def __init__(self, request: Request, tokens: list[int], memory: Memory) -> None:
        self.request = request
        self.tokens = tokens
        self.memory = memory
        self.good = 0
        self.answers: dict[int, int] = {}
        self.loaded = False


class Schedules(RuleBasedStateMachine):
    """Requests in any order, in a memory that is too small; subclasses choose layout and lower tier."""

    groups: tuple[Group, ...] = ALL
    lower = False

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.running: list[Running] = []
        self.random = random.Random(0)

    @initialize(options=OPTIONS, frames=st.sampled_from([3, 8, 40]))
    def start(self, options, frames) -> None:
        self.world = World(
            self.groups, frames=frames * len(self.groups), lower=self.lower, **options
        )
        self.engine = self.world.engine()
        self.options = self.world.config.engine

    @rule(tokens=PROMPTS, skip=st.sampled_from(["", "", "", "skip_load", "skip_save"]))
    def begin(self, tokens, skip) -> None:
        request = self.engine.request("a", tokens, **({skip: True} if skip else {}))
        self.running.append(Running(request, list(tokens), self.world.memory(64)))

    @rule(tokens=PROMPTS)
    def serve(self, tokens) -> None:
        """A whole request at once: something is in the cache."""
        self.world.fill(self.engine, tokens)

    def pick(self, data) -> Running:
        return data.draw(st.sampled_from(self.running), "request")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lookup(self, data) -> None:
        each = self.pick(data)
        local = data.draw(st.integers(0, len(each.tokens)), "local")
        before = each.request.state
        answer = each.request.lookup(local=local)
        assert 0 <= answer <= max(0, len(each.tokens) - 1)
        assert answer == 0 or answer - local >= max(1, self.options.min_retrieve_tokens)
        if self.options.max_tokens_per_load:
            assert answer <= self.options.max_tokens_per_load
        if before is State.ENDED or each.loaded:
            assert answer == 0
        elif local in each.answers:
            assert answer == each.answers[local]
        if not each.loaded:
            each.answers.setdefault(local, answer)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def load(self, data) -> None:
        """The engine has some tokens by itself, at any position, not only at the borders of chunks."""
        each = self.pick(data)
        local = data.draw(st.integers(0, len(each.tokens)), "local")
        each.memory.compute(each.tokens, 0, local)
        good = each.request.load(each.memory, local=local)
        if not each.loaded and local in each.answers and good > local:
            assert good == each.answers[local] or each.request.reason.value == "damaged"
        each.loaded = each.loaded or each.request.state is State.OFFERED
        assert 0 <= good <= max(local, len(each.tokens) - 1)
        assert each.memory.wrong(each.tokens, good) == []
        # The engine computes the rest: all rows are right now, those of windows too.
        each.memory.compute(each.tokens, 0, len(each.tokens))
        each.good = len(each.tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), computed=st.integers(0, 64))
    def store(self, data, computed) -> None:
        each = self.pick(data)
        computed = min(computed, each.good)
        saved = each.request.store(each.memory, computed)
        assert min(saved.stored, saved.present, saved.left) >= 0
        assert saved.stored + saved.present + saved.left <= computed
        assert saved.left == 0 or saved.reason

    @precondition(lambda self: self.running)
    @rule(data=st.data(), passed=st.integers(0, 30))
    def window_passes(self, data, passed) -> None:
        each = self.pick(data)
        last = len(self.groups) - 1
        if self.groups[last].window:
            each.memory.gone[last] = max(each.memory.gone.get(last, 0), passed)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def decode(self, data, more) -> None:
        each = self.pick(data)
        if len(each.tokens) + len(more) <= 48:
            each.request.extend(more)
            each.tokens += more
            if each.good == len(each.tokens) - len(more):
                each.memory.compute(each.tokens, each.good, len(each.tokens))
                each.good = len(each.tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), forget=st.booleans())
    def end(self, data, forget) -> None:
        """Finished, aborted or preempted; some engines call it again."""
        each = self.pick(data)
        each.request.end()
        if forget:
            self.running.remove(each)

    @rule(seed=st.integers(0, 1 << 16))
    def damage(self, seed) -> None:
        self.random.seed(seed)
        keys = self.world.resident()
        if keys:
            self.world.damage(self.random.choice(sorted(keys)), self.random)

    @rule(seed=st.integers(0, 1 << 16), where=st.sampled_from(["memory", "everywhere"]))
    def forget(self, seed, where) -> None:
        """Eviction takes some values; somebody deletes others."""
        self.random.seed(seed)
        keys = sorted(self.world.resident())
        keys = self.random.sample(keys, len(keys) // 2)
        if where == "memory":
            self.world.manager.pool.drop(keys)
        else:
            self.world.sync.delete(keys)

    @rule()
    def settle(self) -> None:
        self.world.sync.flush()

    @invariant()
    def held_by_running_requests_only(self) -> None:
        if self.world and self.lower:
            self.world.sync.flush()  # the writer holds leases of its own, for as long as it likes
        if self.world and not self.running:
            stock = self.world.manager.pool.accounting()
            assert (stock.leased, stock.reserved) == (0, 0)

    def teardown(self) -> None:
        if self.world is None:
            return
        for each in self.running:
            each.request.end()
        try:
            self.world.idle()
            for tokens in (range(21), range(16)):
                self.world.reuse(self.engine, list(tokens))
        finally:
            self.world.sync.close()


def machine(name: str, groups: tuple[Group, ...], *, lower: bool = False) -> type:
    made = type(name, (Schedules,), {"groups": groups, "lower": lower}).TestCase  # type: ignore[attr-defined]
    made.settings = settings(
        max_examples=50,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return made


TestOneGroup = machine("OneGroup", ALL)
TestTwoGroups = machine("TwoGroups", TWO)
TestWindow = machine("Window", WINDOW)
TestState = machine("State", POINT)
TestOverALowerTier = machine("OverALowerTier", ALL, lower=True)
TestWindowOverALowerTier = machine("WindowOverALowerTier", WINDOW, lower=True)

assert CHUNK == 4  # the sizes above are chosen for it
