"""Structured output: the tokens that a grammar allows next.

llguidance reads JSON schemas, regular expressions, lists of choices and grammars, and gives a mask over the vocabulary
for every state. A matcher follows one request: what is allowed depends on the tokens generated so far alone, so the
tokens of full depth after drafts are masked too, and what is not accepted is rolled back. On the plain path drafts are
masked as well.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tide_core.errors import EngineError, RequestError
from tide_core.request import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Compiled grammars that are kept; a client mostly sends the same one again."""

FIRST_MISFITS = 0.5
"""Of a new text: it takes some tokens until a model writes what it was not asked for in words."""
MAX_MASKS = 16
"""Masks that a matcher keeps: more than a cycle has drafts. Each has a bit for every token of the vocabulary."""
MAX_FOLLOWED_S = 2.0
"""Processor time that following one text may take, while all rows wait. 4,000 tokens of a schema take some 10 ms; of an
ambiguous grammar every token may take longer than the one before, up to a fifth of a second."""
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,20}"}
"""JSON may be written with spaces and lines. Without an end to them a weak model may write nothing else."""
SLICE = r'[^"\\\x00-\x1F\x7F]{1,20}'
"""Tokens of a text of up to so many characters, whose masks llguidance keeps ready beside those of 10, 30 and any: near
the end of a text whose length is limited it walks through the vocabulary where none of them can be used."""

Mask = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint8]


class Grammars:
    """Compiles grammars for one tokenizer. May be used by several threads at once."""

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._hf, self._vocab_size, self._eos_ids = hf_tokenizer, vocab_size, list(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None  # made for the first grammar: it takes about a second
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a text."""
        with self._lock:
            if (compiled := self._compiled.get(grammar)) is None:
                compiled = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarMatcher(compiled.deep_copy(), self._vocab_size, self._eos_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer, grammar_from
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            if not self._eos_ids:
                raise RequestError(grammar.field, grammar.kind, "a model with an end-of-text token")
            try:
                slices = LLTokenizer.general_slices()
                slices.insert(2, SLICE)
                self._tokenizer = from_tokenizer(self._hf, self._vocab_size, self._eos_ids, slices)
            except ValueError as error:
                expected = f"none: no grammar can be followed with this model's tokenizer ({error})"
                raise RequestError(grammar.field, grammar.kind, expected) from error
        try:
            text = grammar.text
            if grammar.kind == "json_schema":
                definition = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
            else:
                if grammar.kind == "choice" and not json.loads(text):
                    raise ValueError("no choice")
                definition = grammar_from(grammar.kind, text)  # type: ignore[arg-type]
            matcher = LLMatcher(self._tokenizer, definition, log_level=0)
        except (ValueError, json.JSONDecodeError) as error:
            raise RequestError(grammar.field, grammar.kind, f"a grammar that can be compiled: {error}") from error
        if matcher.is_error():
            raise RequestError(grammar.field, grammar.kind, f"a grammar that can be compiled: {_reason(matcher)}")
        return matcher


class GrammarMatcher:
    """The grammar of one request. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._only_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._only_eos[list(eos_ids)] = True
        self.masked_at, self.misfits = -1, FIRST_MISFITS
        self._consumed: list[int] = []
        self._followed: Sequence[int] = ()
        self._num_known = 0
        """Of the output ids that were followed last: so many need no second look, as outputs only grow."""
        self._num_matched = 0
        """How many of them the matcher has consumed: none after the end of the text."""
        self._followed_s = 0.0
        self._masks: OrderedDict[int, Bits] = OrderedDict()
        """The last few, by number of consumed tokens: verification asks for those of the drafts again."""

    def allowed(self, output_ids: Sequence[int]) -> Mask:
        """[V]: which tokens may follow these. At least one may; at the end of the text only end-of-text ids."""
        self._follow(output_ids)
        num = len(self._consumed)
        if (mask := self._masks.get(num)) is None:
            mask = self._masks[num] = self._compute()
            if len(self._masks) > MAX_MASKS:
                self._masks.popitem(last=False)
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(np.bool_)

    def num_allowed(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """How many of `token_ids` may follow one after another, before the end of the text."""
        self._follow(output_ids)
        if self._matcher.is_stopped():
            return 0
        began = time.thread_time()
        num = self._matcher.validate_tokens(list(token_ids))
        self._followed_s += time.thread_time() - began
        return num

    def num_fitting(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """How many of `token_ids` may follow one after another, the end of the text included. No mask is computed where
        all may."""
        fitting = self.num_allowed(output_ids, token_ids)
        while fitting < len(token_ids) and self.allowed([*output_ids, *token_ids[:fitting]])[token_ids[fitting]]:
            fitting += 1
        return fitting

    def must_end(self, output_ids: Sequence[int]) -> bool:
        """Whether nothing but the end of the text may follow."""
        return not bool((self.allowed(output_ids) & ~self._only_eos).any())

    def write(self, output_ids: Sequence[int], words: npt.NDArray[np.int32], drafts: Sequence[int] = ()) -> None:
        """What may follow these and some drafts as bits, the first token in the lowest one, into [ceil(V / 32)] words
        that lie together."""
        self._follow(output_ids, drafts)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def _compute(self) -> Bits:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot be followed: {_reason(self._matcher)}")

    def _follow(self, output_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Bring the matcher to the state after these tokens."""
        if self._followed_s > MAX_FOLLOWED_S:
            raise EngineError(f"the grammar cannot be followed: it took {self._followed_s:.1f} s, it is too ambiguous")
        consumed = self._consumed
        known = min(self._num_known, len(output_ids)) if output_ids is self._followed else 0
        wanted, mine = [*output_ids[known:], *drafts], consumed[known:]
        self._followed = ()  # nothing is known if the matcher raises
        if wanted[: len(mine)] != mine:
            pairs = zip(mine, wanted, strict=False)
            num = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(mine), len(wanted)))
            same = known + num
            self._matcher.rollback(max(self._num_matched - same, 0))
            self._num_matched = min(self._num_matched, same)
            del consumed[same:]
            for length in [length for length in self._masks if length > same]:
                del self._masks[length]
        began = time.thread_time()
        for token_id in wanted[len(consumed) - known :]:
            if not self._matcher.is_stopped():  # else only end-of-text ids follow
                if not self._matcher.consume_token(token_id):
                    self._check()
                self._num_matched += 1
            consumed.append(token_id)
        self._followed_s += time.thread_time() - began
        self._followed, self._num_known = output_ids, len(output_ids)


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().splitlines()[0]
