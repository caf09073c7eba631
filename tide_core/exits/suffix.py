"""Suffix drafts: what followed the same tokens before, in this request or in earlier outputs. No torch here.

Prompt lookup, as in n-gram speculation and suffix decoding: the last tokens of a row are searched in its prompt, in its
own output and in earlier outputs of the same salt. The tokens that follow the match are the drafts. They cost no draft
pass, and full depth verifies them like any draft.

A text is indexed by trigram, with hash chains as in LZ77: each trigram has the place after its latest occurrence, and
each place has the previous one with the same trigram. A search compares a few places of the chain and takes the longest
match.

Acceptance is counted by length of the match over all rows, and for each row. Every match is compared with the tokens
that the row gains next, whether or not it was drafted. So the counts follow the traffic, and no step has to try drafts
just to count them.
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
"""Shortest match; and the length from which on a longer match is no more likely to be right."""
MAX_PLACES = 8
"""Places that one search compares."""
MAX_SUFFIX_DRAFTS = 15
"""Most drafts of a row: with the newest token, a deep pass of 16."""
MAX_INDEXED, MAX_AT_ONCE = 2**16, 1024
"""Most tokens of a text that are indexed, its last ones; and most that are indexed in one step."""
TOKEN_BITS = 20
"""Of a token id in the key of a trigram."""
MAX_SHARED, MAX_SHARED_PER_SALT = 2**18, 2**15
"""Most tokens of earlier outputs that are kept, in all and for each salt."""
LEAST_SHARED = 16
"""Fewest tokens of an output that is kept."""
LENGTHS = (3, 4, 6, 9, MAX_MATCH)
PRIORS, PRIOR_WEIGHT = (0.45, 0.6, 0.7, 0.8, 0.85), 20.0
"""Least length of each group of matches that is counted separately; the acceptance that each group starts with, and the
number of tries that it stands for."""
ROW_WEIGHT, ROW_MEMORY = 4.0, 24.0
"""Number of tries that the acceptance over all rows counts for in that of one row; and the number of its own tries from
which on older ones fade."""


class Match(NamedTuple):
    """An earlier occurrence of a text's last tokens."""

    place: int
    """Where what followed begins."""
    length: int


class TokenIndex:
    """A text that grows, indexed by trigram."""

    __slots__ = ("_before", "_first", "_latest", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """Of a long text only the last tokens are indexed."""
        self.tokens: list[int] = list(tokens)
        self._first = max(0, len(self.tokens) - MAX_INDEXED)
        self._latest: dict[int, int] = {}
        self._before: list[int] = []
        """For each indexed place, the previous place with the same trigram; -1 if there is none."""

    @property
    def num_pending(self) -> int:
        """Number of places that are not indexed yet. The end of the text is not a place, since nothing follows it."""
        return max(0, len(self.tokens) - self._first - MIN_MATCH - len(self._before))

    def catch_up(self, most: int | None = None) -> None:
        """Index pending places, at most `most` of them."""
        num = self.num_pending if most is None else min(most, self.num_pending)
        tokens, latest, before = self.tokens, self._latest, self._before
        start = self._first + MIN_MATCH + len(before)
        for place in range(start, start + num):
            key = _key(tokens, place)
            before.append(latest.get(key, -1))
            latest[key] = place

    def longest(self, text: Sequence[int]) -> Match | None:
        """The longest match of the last tokens of `text` among the places compared; of equal ones the latest."""
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
        """The `num` tokens that follow a place. Past the end of the text, those from the place on are repeated."""
        tokens, period = self.tokens, len(self.tokens) - place
        found = tokens[place : place + num]
        while len(found) < num:
            found.append(found[len(found) - period])
        return found


def _key(tokens: Sequence[int], end: int) -> int:
    """The trigram that ends before a place, as one number."""
    return (tokens[end - 3] << 2 * TOKEN_BITS) | (tokens[end - 2] << TOKEN_BITS) | tokens[end - 1]


@dataclass(slots=True, eq=False)
class RowSuffixes:
    """The text of one row, and the match that its drafts come from."""

    index: TokenIndex
    num_prompt: int
    source: TokenIndex | None = None
    """The text that the match is in: the row's own, or earlier outputs."""
    match: Match | None = None
    predicted: list[int] = field(default_factory=list)
    """Tokens that followed the match."""
    hits: float = 0.0
    tries: float = 0.0

    def chance(self, of_all: float) -> float:
        """Chance that a draft is right if those before it are: the chance over all rows, corrected by the row's own
        counts."""
        return (ROW_WEIGHT * of_all + self.hits) / (ROW_WEIGHT + self.tries)

    def count(self, hits: int, tries: int) -> None:
        kept = min(1.0, ROW_MEMORY / (self.tries + tries))
        self.hits, self.tries = (self.hits + hits) * kept, (self.tries + tries) * kept


class SuffixDraft(NamedTuple):
    """Suffix drafts of a row, and the chance that each is right if those before it are."""

    token_ids: list[int]
    chance: float


class SuffixDrafts:
    """Drafts for the rows of one engine."""

    def __init__(self, *, shares: bool = True) -> None:
        """`shares`: whether earlier outputs of the same salt are searched, too."""
        self._shared = SharedOutputs() if shares else None
        self._rows: dict[Row, RowSuffixes] = {}
        self.chances = [Chance(PRIOR_WEIGHT * prior, PRIOR_WEIGHT) for prior in PRIORS]
        """By length of the match."""

    def propose(self, row: Row) -> SuffixDraft | None:
        """Drafts that follow the tokens that a row has now; None if there is no match."""
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
        mine.predicted = mine.source.following(mine.match.place, MAX_SUFFIX_DRAFTS)
        chance = mine.chance(self.chances[_group(mine.match.length)].value)
        return SuffixDraft(_until_end(mine.predicted, row.request.end_ids), chance)

    def remove(self, row: Row) -> None:
        """Drop a row that has ended. Its output is kept for later rows of the same salt."""
        self._rows.pop(row, None)
        if self._shared is not None and len(row.output_ids) >= LEAST_SHARED:
            self._shared.add(row.request.cache_salt, row.output_ids)

    def _observe(self, mine: RowSuffixes, gained: Sequence[int]) -> None:
        """Count how many of the predicted tokens the row has gained, and continue the match if it got all of them."""
        if mine.match is None or not gained:
            return
        hits = 0
        for predicted, token in zip(mine.predicted, gained, strict=False):
            if predicted != token:
                break
            hits += 1
        tries = min(hits + 1, len(gained), len(mine.predicted))
        self.chances[_group(mine.match.length)].count(hits, tries)
        mine.count(hits, tries)
        continues = hits == len(gained) and hits <= len(mine.predicted)
        mine.match = Match(mine.match.place + hits, mine.match.length + hits) if continues else None

    def _search(self, mine: RowSuffixes, gained: Sequence[int], salt: str) -> None:
        """Keep a match that continues, or search for one."""
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
    """Earlier outputs by salt. Each salt has two parts, and the older one is dropped when the newer one is full; beyond
    the bound for all salts, the least recently used salt is dropped."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, list[TokenIndex]] = OrderedDict()
        self.num_tokens = 0

    def of(self, salt: str) -> list[TokenIndex]:
        """The parts of a salt, the newer one first."""
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
    """The tokens up to and including the first one that ends the text."""
    for number, token_id in enumerate(token_ids, 1):
        if token_id in end_ids:
            return list(token_ids[:number])
    return list(token_ids)
