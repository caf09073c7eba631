"""Suffix drafts: what followed the same tokens before, in this request or in earlier outputs. No torch here.

The newest tokens of a row often stand somewhere already: in its prompt, in its own output, or in an earlier output of
the same salt. What followed them there is drafted. It costs no pass, and full depth verifies it like any draft.

A text is indexed as LZ77 coders do it: for every three tokens in a row the place after their latest occurrence, and for
every place the one before with the same three tokens. Of a few places the one is taken whose match is longest.

Whether a suffix draft is right is counted for all rows by length of the match, and for each row by itself. Every match
is compared with the tokens that followed, whether or not it was drafted, so the chances are those of the text served
now and need no trial.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tide_core.exits.cost import Chance
from tide_core.row import Row

MIN_MATCH, MAX_MATCH = 3, 12
"""Tokens that must agree, and after which a longer match says no more."""
MAX_PLACES = 8
"""Earlier places that one search compares."""
MAX_GIVEN = 15
"""Most drafts of a row: with the newest token, a deep pass of 16."""
MAX_INDEXED, MAX_AT_ONCE = 2**16, 1024
"""Tokens of a text that are indexed, the last ones of longer texts; and how many of them in one step."""
TOKEN_BITS = 20
MAX_SHARED, MAX_SHARED_PER_SALT = 2**18, 2**15
"""Tokens of earlier outputs that are kept, in all and for each salt."""
LEAST_SHARED = 16
"""Tokens of an output that is worth keeping."""
LENGTHS = (3, 4, 6, 9, MAX_MATCH)
PRIORS, PRIOR_WEIGHT = (0.45, 0.6, 0.7, 0.8, 0.85), 20.0
"""Lengths of matches that are counted apart, and the chances that they start with, worth so many tries."""
ROW_WEIGHT, ROW_MEMORY = 4.0, 24.0
"""Tries of a row that weigh as much as all others, and after which its older ones fade."""


class Match(NamedTuple):
    """An earlier occurrence of a text's last tokens."""

    place: int
    """Where what followed begins."""
    length: int


class TokenIndex:
    """A growing text in which the last tokens of a text are found."""

    __slots__ = ("_before", "_first", "_latest", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """Of a long text only the last tokens are indexed."""
        self.tokens: list[int] = list(tokens)
        self._first = max(0, len(self.tokens) - MAX_INDEXED)
        self._latest: dict[int, int] = {}
        self._before: list[int] = []
        """Of each indexed place: the one before with the same tokens, -1 for none."""

    @property
    def num_pending(self) -> int:
        """Places that are not indexed yet. The end of the text is no place: nothing follows."""
        return max(0, len(self.tokens) - self._first - MIN_MATCH - len(self._before))

    def catch_up(self, most: int | None = None) -> None:
        """Index pending places, at most so many."""
        num = self.num_pending if most is None else min(most, self.num_pending)
        tokens, latest, before = self.tokens, self._latest, self._before
        start = self._first + MIN_MATCH + len(before)
        for place in range(start, start + num):
            key = _key(tokens, place)
            before.append(latest.get(key, -1))
            latest[key] = place

    def longest(self, text: Sequence[int]) -> Match | None:
        """The place whose tokens before it agree with most of the text's last ones; the latest of equals."""
        if len(text) < MIN_MATCH:
            return None
        tokens, before, first = self.tokens, self._before, self._first
        place, best = self._latest.get(_key(text, len(text)), -1), None
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length, most = MIN_MATCH, min(MAX_MATCH, len(text), place)
            while length < most and tokens[place - length - 1] == text[-length - 1]:
                length += 1
            if best is None or length > best.length:
                best = Match(place, length)
            if length == MAX_MATCH:
                break
            place = before[place - first - MIN_MATCH]
        return best

    def following(self, place: int, num: int) -> list[int]:
        """What followed there; where the text ends, it goes on as it would if it were periodic."""
        tokens, period = self.tokens, len(self.tokens) - place
        found = tokens[place : place + num]
        while len(found) < num:
            found.append(found[len(found) - period])
        return found


def _key(tokens: Sequence[int], end: int) -> int:
    """Of the three tokens before a place."""
    return (tokens[end - 3] << 2 * TOKEN_BITS) | (tokens[end - 2] << TOKEN_BITS) | tokens[end - 1]


@dataclass(slots=True, eq=False)
class RowSuffixes:
    """The text of one row, and the match that its drafts come from."""

    index: TokenIndex
    num_prompt: int
    source: TokenIndex | None = None
    """Where the match is: in the row's own text or in earlier outputs."""
    match: Match | None = None
    predicted: list[int] = field(default_factory=list)
    hits: float = 0.0
    tries: float = 0.0

    def chance(self, of_all: float) -> float:
        """That a draft is right which follows right ones: that of all rows, and what this row has seen."""
        return (ROW_WEIGHT * of_all + self.hits) / (ROW_WEIGHT + self.tries)

    def count(self, hits: int, tries: int) -> None:
        kept = min(1.0, ROW_MEMORY / (self.tries + tries))
        self.hits, self.tries = (self.hits + hits) * kept, (self.tries + tries) * kept


class SuffixDraft(NamedTuple):
    """What may follow a row, and the chance of each token given those before it."""

    token_ids: list[int]
    chance: float


class SuffixDrafts:
    """Drafts for the rows of one engine."""

    def __init__(self, *, shares: bool = True) -> None:
        """`shares`: earlier outputs of the same salt are searched too."""
        self._shared = SharedOutputs() if shares else None
        self._rows: dict[Row, RowSuffixes] = {}
        self.chances = [Chance(PRIOR_WEIGHT * prior, PRIOR_WEIGHT) for prior in PRIORS]
        """By length of the match."""

    def propose(self, row: Row) -> SuffixDraft | None:
        """What may follow the tokens that a row has now; None if they do not stand anywhere else."""
        mine = self._rows.get(row)
        if mine is None:
            prompt = row.request.prompt_ids
            mine = self._rows[row] = RowSuffixes(TokenIndex(prompt), len(prompt))
        index = mine.index
        gained = row.output_ids[len(index.tokens) - mine.num_prompt :]
        index.tokens += gained
        self._observe(mine, gained)
        index.catch_up(MAX_AT_ONCE)
        if index.num_pending:
            return None
        self._search(mine, gained, row.request.cache_salt)
        if mine.match is None or mine.source is None:
            return None
        mine.predicted = mine.source.following(mine.match.place, MAX_GIVEN)
        chance = mine.chance(self.chances[_group(mine.match.length)].value)
        return SuffixDraft(_until_end(mine.predicted, row.request.end_ids), chance)

    def remove(self, row: Row) -> None:
        """A row has ended; its output may help later ones."""
        self._rows.pop(row, None)
        if self._shared is not None and len(row.output_ids) >= LEAST_SHARED:
            self._shared.add(row.request.cache_salt, row.output_ids)

    def _observe(self, mine: RowSuffixes, gained: Sequence[int]) -> None:
        """Compare the last match with what followed it."""
        if mine.match is None or not gained:
            return
        hits = 0
        for said, token in zip(mine.predicted, gained, strict=False):
            if said != token:
                break
            hits += 1
        tries = min(hits + 1, len(gained), len(mine.predicted))
        self.chances[_group(mine.match.length)].count(hits, tries)
        mine.count(hits, tries)
        went_on = hits == len(gained) and hits <= len(mine.predicted)
        mine.match = Match(mine.match.place + hits, mine.match.length + hits) if went_on else None

    def _search(self, mine: RowSuffixes, gained: Sequence[int], salt: str) -> None:
        """Keep a match that went on, or find one."""
        if mine.match is not None and mine.source is not None and mine.match.place < len(mine.source.tokens):
            return
        text = mine.index.tokens
        mine.source, mine.match = mine.index, mine.index.longest(text)
        if self._shared is not None and (mine.match is None or mine.match.length < MAX_MATCH):
            for other in self._shared.of(salt):
                found = other.longest(text)
                if found is not None and (mine.match is None or found.length > mine.match.length):
                    mine.source, mine.match = other, found


class SharedOutputs:
    """Earlier outputs by salt, within a bound: the oldest half of a salt's goes first, then salts not used lately."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, list[TokenIndex]] = OrderedDict()
        self.num_tokens = 0

    def of(self, salt: str) -> list[TokenIndex]:
        """The newer part first."""
        found = self._salts.get(salt)
        if found is None:
            return []
        self._salts.move_to_end(salt)
        return found

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        half = MAX_SHARED_PER_SALT // 2
        kept = list(islice(tokens, max(0, len(tokens) - half), None))
        parts = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if not parts or len(parts[0].tokens) + len(kept) > half:
            parts.insert(0, TokenIndex())
            for old in parts[2:]:
                self.num_tokens -= len(old.tokens)
            del parts[2:]
        parts[0].tokens += kept
        parts[0].catch_up()
        self.num_tokens += len(kept)
        while self.num_tokens > MAX_SHARED and len(self._salts) > 1:
            _, dropped = self._salts.popitem(last=False)
            self.num_tokens -= sum(len(part.tokens) for part in dropped)


def _group(length: int) -> int:
    return sum(length >= least for least in LENGTHS) - 1


def _until_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """Up to the first token that ends the text, with it."""
    for number, token_id in enumerate(token_ids, 1):
        if token_id in end_ids:
            return list(token_ids[:number])
    return list(token_ids)
