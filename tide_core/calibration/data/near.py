"""Texts that say nearly the same. One of them in the train part and the other in a held-out one would make exits look
better than they are.

A text is the set of its runs of three words, without case, width and punctuation; one of fewer words is a run of its
own. Two texts are near if the runs they share are at least 0.7 of those that either has (Jaccard). Near texts must
share one of their rarest runs, a third of each (the prefix filter of Bayardo, Ma and Srikant, 2007): only those are in
the index, so beginnings that half of all texts have cost nothing.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import chain

LEAST_SHARED = 0.7

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
"""Chinese and Japanese have no spaces: there each character is a word."""


class DistinctTexts:
    """The texts kept so far, by their runs."""

    def __init__(self) -> None:
        self._kept: list[set[str]] = []
        self._index: dict[str, list[int]] = {}
        self._counts: Counter[str] = Counter()

    def take(self, texts: Sequence[str]) -> list[bool]:
        """Whether each is kept: no text that was kept before is near to it. Most texts should come in the first call,
        which learns from them which runs are rare."""
        sets = [_runs(text) for text in texts]
        if not self._counts:  # any order of the runs will do, as long as it stays
            self._counts.update(chain.from_iterable(sets))
        return [self._take(runs) for runs in sets]

    def _take(self, runs: set[str]) -> bool:
        num_rarest = len(runs) - math.ceil(LEAST_SHARED * len(runs)) + 1
        rarest = sorted(sorted(runs), key=self._counts.__getitem__)[:num_rarest]
        if any(_near(runs, self._kept[other]) for other in {o for run in rarest for o in self._index.get(run, ())}):
            return False
        for run in rarest:
            self._index.setdefault(run, []).append(len(self._kept))
        self._kept.append(runs)
        return True


def _near(one: set[str], two: set[str]) -> bool:
    if min(len(one), len(two)) < LEAST_SHARED * max(len(one), len(two)):
        return False
    shared = len(one & two)
    return shared >= LEAST_SHARED * (len(one) + len(two) - shared)


def _runs(text: str) -> set[str]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return set(map("{} {} {}".format, words, words[1:], words[2:])) or {" ".join(words)}
