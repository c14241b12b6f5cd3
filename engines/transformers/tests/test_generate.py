"""``generate`` with a cache gives what ``generate`` gives, and computes less."""

import pytest
import torch

from engines.transformers.tests.tiny import (
    CHUNK,
    KINDS,
    batch,
    cached,
    greedy,
    make_model,
    open_cache,
    prompt,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_answers_token_for_token(kind: str) -> None:
    model = make_model(kind)
    ids = prompt(61)
    expected = greedy(model, ids, tokens=24)
    with open_cache() as cache:
        mine = cached(model, cache)
        assert greedy(mine, ids, tokens=24) == expected
        assert (mine.last.reused, mine.last.stored) == ((0,), (56,))
        assert greedy(mine, ids, tokens=24) == expected
        assert (mine.last.reused, mine.last.stored) == ((56,), (0,))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17])
def test_any_length_may_be_asked_twice(length: int) -> None:
    model = make_model()
    ids = prompt(length)
    expected = greedy(model, ids)
    with open_cache() as cache:
        mine = cached(model, cache)
        assert [greedy(mine, ids) for _ in range(2)] == [expected] * 2
        full = length // CHUNK * CHUNK
        assert mine.last.reused == (min(full, length - 1),)


def test_a_longer_prompt_uses_what_a_shorter_one_left() -> None:
    """Seen in LMCache#2029."""
    model = make_model()
    ids = prompt(90)
    with open_cache() as cache:
        mine = cached(model, cache)
        for length in (20, 47, 90, 33):
            assert greedy(mine, ids[:length]) == greedy(model, ids[:length])
        assert mine.last.reused == (32,)


@pytest.mark.parametrize("kind", ["llama", "mistral with a window"])
@pytest.mark.parametrize("known", [(), (0,), (0, 1, 2)])
def test_prompts_of_different_lengths_in_one_batch(kind: str, known: tuple[int, ...]) -> None:
    model = make_model(kind)
    prompts = [prompt(37), prompt(12, seed=2), prompt(50, seed=3)]
    how = {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**batch(prompts), **how)
    with open_cache() as cache:
        mine = cached(model, cache)
        for each in known:
            greedy(mine, prompts[each])
        assert torch.equal(mine.generate(**batch(prompts), **how), expected)
        assert mine.last.reused == tuple([32, 8, 48][i] if i in known else 0 for i in range(3))
        assert torch.equal(mine.generate(**batch(prompts), **how), expected)
        assert mine.last.reused == (32, 8, 48)


def test_padding_is_found_as_generate_finds_it() -> None:
    model = make_model()
    ids = batch([prompt(30), prompt(19, seed=2)])["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with open_cache() as cache:
        mine = cached(model, cache)
        for _ in range(2):
            assert torch.equal(mine.generate(ids, max_new_tokens=6, do_sample=False), expected)
        assert mine.last.reused == (24, 16)


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 20},
    ],
    ids=["beams", "several of the beams", "samples"],
)
def test_several_sequences_for_one_prompt(how: dict[str, object]) -> None:
    model = make_model()
    ids = torch.tensor([prompt(40), prompt(40, seed=5)])
    with open_cache() as cache:
        mine = cached(model, cache)
        for _ in range(2):
            torch.manual_seed(7)
            expected = model.generate(ids, max_new_tokens=9, **how)
            torch.manual_seed(7)
            assert torch.equal(mine.generate(ids, max_new_tokens=9, **how), expected)
        assert mine.last.reused == (39, 39)


def test_answers_are_reused_in_the_next_turn() -> None:
    model = make_model()
    with open_cache(save_decode=True) as cache:
        mine = cached(model, cache)
        talk, said = prompt(21), 1
        for turn in range(4):
            answer = greedy(mine, talk, tokens=11)
            assert answer == greedy(model, talk, tokens=11)
            assert mine.last.reused[0] == (said - 1) // CHUNK * CHUNK
            said = len(talk) + len(answer)
            talk = [*talk, *answer, *prompt(5, seed=turn)]


def test_the_tail_of_a_prompt_is_kept_where_asked() -> None:
    model = make_model()
    ids = prompt(29)
    with open_cache(save_partial=True) as cache:
        mine = cached(model, cache)
        assert greedy(mine, ids) == greedy(mine, ids) == greedy(model, ids)
        assert mine.last.reused == (28,)


def test_a_dictionary_is_returned_as_asked() -> None:
    model = make_model()
    ids = torch.tensor([prompt(30)])
    how = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 4}
    expected = model.generate(ids, do_sample=False, **how)
    with open_cache() as cache:
        mine = cached(model, cache)
        for _ in range(2):
            got = mine.generate(ids, do_sample=False, **how)
            assert torch.equal(got.sequences, expected.sequences)
            for mine_scores, scores in zip(got.scores, expected.scores, strict=True):
                torch.testing.assert_close(mine_scores, scores)


def test_the_cache_may_be_left_alone_in_either_direction() -> None:
    model = make_model()
    ids = prompt(40)
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, ids, skip_save=True)
        assert mine.last.stored == (0,)
        greedy(mine, ids, skip_load=True)
        assert (mine.last.reused, mine.last.stored) == ((0,), (40,))
        greedy(mine, ids, skip_load=True)
        assert (mine.last.reused, mine.last.stored) == ((0,), (0,))


def test_labels_delete_what_a_model_stored() -> None:
    model = make_model()
    ids = prompt(40)
    with open_cache() as cache:
        mine = cached(model, cache, tags=["session=1"])
        greedy(mine, ids)
        assert cache.invalidate("session=1") == 5
        greedy(mine, ids)
        assert mine.last.reused == (0,)


def test_time_to_the_first_token_and_own_time_are_told() -> None:
    model = make_model()
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, prompt(40))
        assert mine.last.first_token > 0
        assert mine.last.own > 0
        assert cache.storage.manager.prefill.seconds(40) is not None
