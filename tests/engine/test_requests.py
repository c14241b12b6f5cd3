"""What one request may ask, in any order, and what it gets."""

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core.config import VerifyHot
from lmcache_core.engine import Saved, State
from lmcache_core.identity import Extra, Group, Unkeyable
from lmcache_core.storage.results import Reason
from tests.engine.rig import ALL, CHUNK, POINT, TWO, WINDOW, World, world

PROMPT = list(range(100, 118))  # four chunks and a half


@pytest.fixture
def plain() -> Iterator[World]:
    with world() as made:
        yield made


def test_full_chunks_are_kept_and_offered(plain: World) -> None:
    """Seen in LMCache/LMCache-Ascend#270."""
    engine = plain.engine()
    assert engine.lookup(PROMPT) == 0
    assert plain.fill(engine, PROMPT) == Saved(16, 0)
    assert plain.fill(engine, PROMPT) == Saved(0, 16)
    assert engine.lookup(PROMPT) == 16
    assert plain.reuse(engine, PROMPT) == 16


def test_one_token_is_left_to_compute(plain: World) -> None:
    """Seen in LMCache#3322."""
    engine = plain.engine()
    plain.fill(engine, PROMPT[:16])
    assert engine.lookup(PROMPT[:16]) == 15
    assert plain.reuse(engine, PROMPT[:16]) == 15
    assert engine.lookup(PROMPT[:1]) == 0
    assert engine.lookup([]) == 0


def test_one_changed_token_ends_the_prefix_at_its_chunk(plain: World) -> None:
    engine = plain.engine()
    plain.fill(engine, PROMPT)
    for at in range(16):
        changed = [*PROMPT[:at], 7, *PROMPT[at + 1 :]]
        assert plain.reuse(engine, changed) == at // CHUNK * CHUNK


def test_asking_again_gives_the_same_answer_whatever_happens_meanwhile(plain: World) -> None:
    """Seen in LMCache#2106, LMCache#2091, LMCache#1438."""
    engine = plain.engine()
    plain.fill(engine, PROMPT[:16])
    request = engine.request("a", PROMPT[:16])
    assert request.lookup() == 15
    plain.sync.delete(plain.resident())
    request.extend([1, 2, 3])
    assert [request.lookup(), request.lookup(local=15), request.lookup(local=3)] == [15, 0, 15]
    memory = plain.memory(19)
    assert request.load(memory) == 15
    assert memory.wrong(PROMPT, 15) == []
    assert request.lookup() == 0
    assert request.load(memory) == 0
    request.end()
    assert plain.metrics.snapshot().total("lmcache_lookups_total") == 1


def test_what_the_engine_has_by_itself_may_end_anywhere(plain: World) -> None:
    """Seen in LMCache#2206, LMCache#2158.

    Seen in LMCache#1922.
    """
    engine = plain.engine()
    plain.fill(engine, PROMPT)
    for local in range(18):
        request = engine.request("a", PROMPT)
        gained = request.lookup(local=local)
        assert gained == (16 if local < 16 else 0)
        memory = plain.memory(18)
        memory.compute(PROMPT, 0, local)
        good = request.load(memory, local=local)
        assert good == max(local, 16)
        assert memory.wrong(PROMPT, good) == []
        request.end()


def test_every_call_is_legal_in_every_state(plain: World) -> None:
    """Seen in LMCache#2158, LMCache#3685."""
    engine = plain.engine()
    plain.fill(engine, PROMPT)
    request = engine.request("a", PROMPT)
    memory = plain.memory(18)
    assert request.load(memory) == 16  # without a lookup before
    assert request.store(memory, 16) == Saved(0, 16)
    request.end()
    request.end()
    assert request.state is State.ENDED
    assert (request.lookup(), request.load(memory, local=5)) == (0, 5)
    assert request.store(memory, 18) == Saved(0, 0)
    assert engine.lookup(PROMPT) == 16


def test_a_request_may_leave_the_cache_alone_in_either_direction(plain: World) -> None:
    engine = plain.engine()
    assert plain.fill(engine, PROMPT, skip_save=True) == Saved(0, 0)
    plain.fill(engine, PROMPT, skip_load=True)
    assert plain.reuse(engine, PROMPT, skip_load=True) == 0
    assert plain.reuse(engine, PROMPT) == 16


def test_generated_tokens_become_chunks_too(plain: World) -> None:
    engine = plain.engine()
    answer = [*PROMPT, *range(6)]
    memory = plain.memory(24)
    memory.compute(answer, 0, 24)
    request = engine.request("a", PROMPT)
    assert request.store(memory, 18).stored == 16
    request.extend(range(6))
    assert request.store(memory, 23) == Saved(4, 16)  # the last token has no KV yet
    assert request.store(memory, 99) == Saved(4, 20)
    request.end()
    assert plain.reuse(engine, [*answer, 9]) == 24


def test_short_prefixes_are_not_worth_it() -> None:
    with world(min_retrieve_tokens=9, min_store_tokens=12) as made:
        engine = made.engine()
        assert made.fill(engine, PROMPT[:11]) == Saved(0, 0)
        made.fill(engine, PROMPT)
        assert made.reuse(engine, PROMPT[:9]) == 0
        assert made.reuse(engine, PROMPT[:13]) == 12
        request = engine.request("a", PROMPT)
        assert [request.lookup(local=n) for n in (0, 7, 8)] == [16, 16, 0]
        request.end()


def test_one_load_takes_no_more_than_it_may() -> None:
    with world(max_tokens_per_load=11) as made:
        engine = made.engine()
        made.fill(engine, PROMPT)
        assert made.reuse(engine, PROMPT) == 8


def test_the_tail_is_kept_where_the_option_says_so() -> None:
    with world(save_partial=True) as made:
        engine = made.engine()
        assert made.fill(engine, PROMPT) == Saved(18, 0)
        assert made.reuse(engine, PROMPT) == 17
        assert made.reuse(engine, [*PROMPT, 1]) == 16
        assert made.reuse(engine, PROMPT[:17]) == 16
        one = PROMPT[:17]  # the tail is the one token that has to be computed
        made.fill(engine, one)
        assert made.reuse(engine, one) == 16


def test_a_state_is_offered_at_the_end_of_a_chunk_only() -> None:
    """Seen in ml-explore/mlx-lm#980."""
    with world(POINT) as made:
        engine = made.engine()
        made.fill(engine, PROMPT[:16])
        assert made.reuse(engine, PROMPT[:16]) == 12
        assert made.reuse(engine, PROMPT[:17]) == 16


def test_a_window_that_has_passed_costs_only_what_is_in_it() -> None:
    """Seen in ml-explore/mlx-lm#980."""
    with world(WINDOW) as made:
        engine = made.engine()
        memory = made.memory(16)
        memory.compute(PROMPT, 0, 16)
        memory.gone[1] = 8
        request = engine.request("a", PROMPT[:16])
        saved = request.store(memory, 16)
        assert (saved.stored, saved.left, saved.reason) == (16, 0, "token 0 has left the window")
        request.end()
        assert made.reuse(engine, PROMPT) == 16
        assert made.reuse(engine, PROMPT[:13]) == 0  # a hit of 12 tokens needs tokens from 6 on


@pytest.mark.parametrize("groups", [ALL, TWO])
def test_nothing_is_kept_behind_a_gap(groups: tuple[Group, ...]) -> None:
    """Seen in LMCache#2029, vllm#26329."""
    with world(groups) as made:
        engine = made.engine()
        memory = made.memory(16)
        memory.compute(PROMPT, 0, 16)
        packed: list[int] = []
        pack = memory.pack

        def once(group: int, first: int, *rest: Any) -> Any:
            packed.append(first)
            if first == 4:
                raise ValueError("not there")
            return pack(group, first, *rest)

        memory.pack = once  # type: ignore[method-assign]
        request = engine.request("a", PROMPT[:16])
        assert request.store(memory, 16) == Saved(4, 0, 12, "not there")
        assert packed == [0] * len(groups) + [4]
        assert made.manager.pool.accounting().reserved == 0
        request.end()
        assert made.reuse(engine, PROMPT) == 4


def test_a_gap_in_what_is_found_gives_its_leases_back() -> None:
    with world(WINDOW) as made:
        engine = made.engine()
        made.fill(engine, PROMPT[:16])
        everything = made.resident()
        for key in everything:
            made.manager.pool.drop([key])
            request = engine.request("a", PROMPT)
            request.lookup()
            request.end()
            assert made.manager.pool.accounting().leased == 0
            made.fill(engine, PROMPT[:16])


def test_tenants_share_nothing(plain: World) -> None:
    """Seen in sglang#37160."""
    engine = plain.engine()
    plain.fill(engine, PROMPT, tenant="a")
    assert plain.reuse(engine, PROMPT) == 0
    assert plain.reuse(engine, PROMPT, tenant="b") == 0
    assert plain.reuse(engine, PROMPT, tenant="a") == 16
    assert plain.reuse(plain.engine(tenant="a"), PROMPT) == 16


def test_labels_delete_what_was_stored_under_them(plain: World) -> None:
    engine = plain.engine()
    plain.fill(engine, PROMPT, tags=["user=7", "x" * 255])
    plain.fill(engine, PROMPT[4:], tags=["other"])
    assert plain.reuse(engine, PROMPT, tags=["user=8"]) == 16
    assert plain.sync.call(plain.manager.invalidate("user=7")) == 4
    assert (plain.reuse(engine, PROMPT), plain.reuse(engine, PROMPT[4:])) == (0, 12)


def test_labels_named_by_configuration_part_equal_prompts() -> None:
    with world(tags_in_key=("user",)) as made:
        engine = made.engine()
        made.fill(engine, PROMPT, tags=["user=1", "mood=good"])
        reused = [
            made.reuse(engine, PROMPT, tags=tags)
            for tags in (["user=1"], ["mood=bad", "user=1"], ["user=2"], ["user"], [])
        ]
        assert reused == [16, 16, 0, 0, 0]


@pytest.mark.parametrize("tags", [["x"] * 17, [""], ["y" * 256], ["\ud800"]])
def test_a_label_no_frame_can_carry_is_refused_and_counted(plain: World, tags: list[str]) -> None:
    with pytest.raises(Unkeyable):
        plain.engine().request("a", PROMPT, tags=tags)
    assert plain.metrics.snapshot().total("lmcache_unkeyed_requests_total") == 1


def test_input_without_a_key_is_refused_and_counted(plain: World) -> None:
    engine = plain.engine()
    for tokens in ([1, -1, 2], [1 << 32]):
        with pytest.raises(Unkeyable):
            engine.request("a", tokens)
    request = engine.request("a", PROMPT)
    with pytest.raises(Unkeyable):
        request.extend([5, -1])
    assert request.tokens == 18
    request.end()
    assert plain.metrics.snapshot().total("lmcache_unkeyed_requests_total") == 3


def test_a_picture_parts_prompts_from_its_chunk_on(plain: World) -> None:
    engine = plain.engine()
    pictures = [[Extra("media", bytes([n]) * 32, 9, 12)] for n in range(2)]
    plain.fill(engine, PROMPT, extras=pictures[0])
    assert plain.reuse(engine, PROMPT, extras=pictures[0]) == 16
    assert plain.reuse(engine, PROMPT, extras=pictures[1]) == 8
    assert plain.reuse(engine, PROMPT) == 8


def test_damage_ends_the_load_and_is_repaired_by_the_next_store(plain: World) -> None:
    engine = plain.engine()
    plain.fill(engine, PROMPT)
    bad = engine.request("a", PROMPT)
    assert plain.damage(plain.manager.pool.lease(plain.resident(), "x")[0].key, random.Random(1))  # type: ignore[union-attr]
    plain.manager.pool.close_owner("x", proof=True)
    bad.lookup()
    memory = plain.memory(18)
    good = bad.load(memory)
    assert good < 16
    assert bad.reason is Reason.DAMAGED
    assert memory.wrong(PROMPT, good) == []
    bad.end()
    plain.fill(engine, PROMPT)
    assert plain.reuse(engine, PROMPT) == 16
    assert plain.metrics.snapshot().total("lmcache_failed_load_tokens_total") == 16 - good


def test_damage_around_local_tokens_takes_them_along(plain: World) -> None:
    engine = plain.engine()
    plain.fill(engine, PROMPT)
    memory = plain.memory(18)
    memory.compute(PROMPT, 0, 6)
    request = engine.request("a", PROMPT)
    assert request.lookup(local=6) == 16
    for key in plain.resident():
        plain.damage(key, random.Random(2))
    assert request.load(memory, local=6) == 4
    assert memory.wrong(PROMPT, 4) == []
    request.end()


@pytest.mark.parametrize(
    ("rule", "checked"), [(VerifyHot.OFF, 0), (VerifyHot.SAMPLE, 2), (VerifyHot.ALWAYS, 100)]
)
def test_hot_loads_are_verified_as_often_as_asked(rule: VerifyHot, checked: int) -> None:
    with world(verify_hot=rule) as made:
        assert sum(made.engine().verify_next() for _ in range(0)) == 0
        engine = made.engine()
        assert sum(engine.verify_next() for _ in range(100)) == checked


def test_memory_without_room_is_the_callers_error_and_nothing_stays_leased(plain: World) -> None:
    engine = plain.engine()
    plain.fill(engine, PROMPT[:16])
    request = engine.request("a", PROMPT[:16])
    assert (request.lookup(), request.room) == (15, 16)
    with pytest.raises(ValueError, match="room for 15"):
        request.load(plain.memory(15))
    assert plain.manager.pool.accounting().leased == 0
    request.end()


def test_an_approximate_engine_reads_exact_chunks_and_writes_its_own(plain: World) -> None:
    exact, approximate = plain.engine(), plain.engine(fidelity="approx:q")
    plain.fill(exact, PROMPT[:8])
    assert plain.reuse(approximate, PROMPT) == 8
    plain.fill(approximate, PROMPT)
    assert (plain.reuse(exact, PROMPT), plain.reuse(approximate, PROMPT)) == (8, 16)


def test_time_in_the_caches_own_code_is_measured(plain: World) -> None:
    engine = plain.engine()
    ticks = iter(range(1000))
    engine.timer = lambda: next(ticks)
    plain.fill(engine, PROMPT)
    request = engine.request("a", PROMPT)
    request.lookup()
    request.load(plain.memory(18))
    request.end()
    assert request.seconds == 4
    snapshot = plain.metrics.snapshot()
    verbs = {dict(s.labels)["verb"]: s.value for s in snapshot.matching("lmcache_request_seconds")}
    assert verbs == {"key": 2, "lookup": 1, "load": 1, "store": 1, "end": 2}


@pytest.mark.parametrize("groups", [ALL, TWO, WINDOW, POINT])
def test_a_full_memory_keeps_the_longest_prefix_that_fits(groups) -> None:
    """Seen in LMCache#2106."""
    with world(groups, frames=5 * len(groups)) as made:
        engine = made.engine()
        saved = made.fill(engine, list(range(60)))
        assert (saved.stored, saved.left, saved.reason) == (20, 40, "full")
        assert made.reuse(engine, list(range(60))) == 20


def test_an_ended_cache_answers_with_misses_and_refusals() -> None:
    with world(lower=True) as made:
        engine = made.engine()
        made.fill(engine, PROMPT)
        made.idle()
    request = engine.request("a", PROMPT)
    assert request.lookup() == 0
    assert request.store(made.memory(18), 18).stored == 0
    request.end()


def test_a_call_that_waits_while_the_cache_closes_is_answered() -> None:
    with world(lower=True) as made:
        engine = made.engine()
        asked = threading.Event()

        async def never(*args: object, **how: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        made.manager.complete = never
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(engine.lookup(PROMPT)), daemon=True)
        waiting.start()
        assert asked.wait(10)
        made.sync.close()
        waiting.join(10)
        assert found == [0]
