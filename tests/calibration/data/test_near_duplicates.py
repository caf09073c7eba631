"""Near-duplicates: all are found, no other texts are, and few texts are compared."""

from __future__ import annotations

import random

import pytest

from tide_core.calibration.data.self_prompts import LEAST_SHARED, DistinctTexts, _near, _runs

WORDS = [f"w{number}" for number in range(60)]


def distinct(texts: list[str]) -> list[str]:
    return [text for text, kept in zip(texts, DistinctTexts().take(texts), strict=True) if kept]


def varied(num: int, seed: int = 0, words: list[str] = WORDS) -> list[str]:
    """Texts of which half are another one with a few words changed, and many begin alike."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(num):
        if texts and draw.random() < 0.5:
            changed = [word if draw.random() > 0.04 else draw.choice(words) for word in draw.choice(texts).split()]
        else:
            changed = ["please", "tell", "me", "about", *draw.choices(words, k=draw.randint(0, 30))]
        texts.append(" ".join(changed))
    return texts


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is the capital of France?", "what is  the capital of\nFRANCE"),
        ("Hello!", "hello"),
        ("...", "?!"),
        ("Write a poem about the sea and the sky for me", "Write a poem about the sea and the sky for us"),
        ("写一首关于大海的诗给我看看吧", "写一首关于大海的诗给我看看啊"),
        ("Ｗｈａｔ now", "what now"),
    ],
)
def test_case_width_spaces_punctuation_and_a_word_in_many_do_not_make_another_text(one: str, two: str) -> None:
    assert distinct([one, two]) == [one]
    assert distinct([two, one]) == [two]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is the capital of France?", "What is the capital of Spain?"),
        ("Hello", "Goodbye"),
        ("one two", "two one"),
        ("写一首关于大海的诗", "讲一个关于月亮的故事"),
    ],
)
def test_texts_that_ask_for_other_things_are_kept(one: str, two: str) -> None:
    assert distinct([one, two]) == [one, two]


def test_the_index_finds_what_a_look_at_all_pairs_finds() -> None:
    texts = varied(400)
    kept: list[str] = []
    for text in texts:
        if not any(_near(_runs(text), _runs(other)) for other in kept):
            kept.append(text)

    assert 50 < len(kept) < 350
    assert distinct(texts) == kept


def test_several_calls_give_the_result_of_one() -> None:
    texts, known = varied(300, seed=1), DistinctTexts()
    several = [flag for start in range(0, 300, 70) for flag in known.take(texts[start : start + 70])]

    assert several == DistinctTexts().take(texts)


def test_no_two_kept_texts_share_as_much_as_the_limit() -> None:
    runs = [_runs(text) for text in distinct(varied(200, seed=2))]

    shares = [len(a & b) / len(a | b) for n, a in enumerate(runs) for b in runs[:n]]
    assert max(shares) < LEAST_SHARED


def test_a_text_is_compared_with_few_others_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(one: set[str], two: set[str]) -> bool:
        nonlocal compared
        compared += 1
        assert compared < len(texts), "of 200 million pairs"
        return _near(one, two)

    monkeypatch.setattr("tide_core.calibration.data.self_prompts._near", counted)
    texts = varied(20_000, words=[f"w{number}" for number in range(3000)])

    kept = DistinctTexts().take(texts)

    assert sum(kept) > 5000
    assert compared > 0
