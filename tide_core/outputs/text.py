"""The text of one request, token by token.

The rule: output text is what the output adds to the text before it. Decoders may treat the very first token of a text
apart (Llama-style ones drop its leading space), so output is decoded after one token of the prompt, the anchor, and
the anchor's own text is taken off again. If prompt and output meet inside a character, its halves stay apart: each
side shows U+FFFD for its own.

Text is released once no later token can change it. Until then its ids are held:

    prompt ... anchor | released ids (forgotten) | held ids | next id

so a push decodes the anchor and a few held ids, however long the output is. Held are:
- ids whose text ends in U+FFFD: it may be a character with bytes still to come;
- a run of byte ids (`<0xE2>`): such a run is text only if all of it is, which its end decides.
Where one id has the same text after every anchor, its text is looked up the next time instead of decoded.
The `DecodeStream` of the tokenizers library keeps a window too, but has no end to release what it holds, and fails on
byte runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tide_core.errors import RequestError

SPLIT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_IDS = 16
"""Past this many the held ids are cut where that changes no text; bytes that never become text do not pile up."""
MAX_CUTS_TRIED = 4
"""A character has at most four bytes, so one of four neighbouring borders is hardly ever inside one."""


@dataclass(frozen=True, slots=True)
class IdText:
    """How the ids of one tokenizer become text."""

    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    silent_ids: frozenset[int]
    """Ids that `decode` leaves out: special tokens, and numbers that stand for no token."""
    byte_ids: frozenset[int]
    """Ids that stand for one byte each."""
    whole: dict[int, str] | None = None
    """Texts met so far of ids that are text by themselves. None: what an id reads as may depend on the one before."""

    def check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError("token_id", token_id, f"a token id in 0..{self.vocab_size - 1}")


class TextStream:
    """Turns ids into text as they come. What `push` and `finish` return joins to the output text, up to a stop string
    or, with `include_stop`, up to its end.

    Of several stop strings the one that is complete first ends the text, and of two that end together the longer one,
    so the outcome does not depend on where tokens begin and end.
    """

    def __init__(
        self, id_text: IdText, prompt_ids: Sequence[int], stop: tuple[str, ...], *, include_stop: bool = False
    ) -> None:
        self._id_text = id_text
        self._stop, self._include_stop = stop, include_stop
        self.stopped = False
        """Whether a stop string was found; nothing after it is ever released. `finish` too may find one."""
        self._held: list[int] = []
        self._withheld = ""  # decoded, but perhaps the beginning of a stop string
        self._set_anchor(_last_whole_id(id_text, prompt_ids))

    def push(self, token_id: int) -> str:
        """Take one output id; return the text it releases, often none."""
        if self._known is not None and not (self._held or self.stopped):
            text = self._known.get(token_id)
            if text is not None:
                return self._before_stop(text) if self._stop else text
        self._id_text.check(token_id)
        if self.stopped or token_id in self._id_text.silent_ids:
            return ""
        self._held.append(token_id)
        return self._before_stop(self._released())

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """The texts of several ids. Not for a text with stop strings, which may end among them."""
        known = self._known
        if known is not None and not self._held:
            texts = list(map(known.get, token_ids))
            if None not in texts:
                return texts  # type: ignore[return-value]
        return [self.push(token_id) for token_id in token_ids]

    def finish(self) -> str:
        """Return all that is still held; half characters become U+FFFD."""
        text = self._before_stop(self._text(self._held))
        self._held.clear()
        text, self._withheld = text + self._withheld, ""
        return text

    def _released(self) -> str:
        """Take the text that no later id can change out of the held ids."""
        held = self._held
        if held[-1] in self._id_text.byte_ids:
            return ""
        text = self._text(held)
        if not text.endswith(SPLIT_CHARACTER):
            if not self._anchor:
                self._set_anchor(held[-1:])
            elif self._known is not None and len(held) == 1:
                self._known[held[0]] = text
            held.clear()
            return text
        if len(held) > MAX_HELD_IDS:
            for cut in range(len(held) - 1, len(held) - 1 - MAX_CUTS_TRIED, -1):
                head = self._text(held[:cut])
                if head + self._text(held[cut:]) == text:  # the border is not inside a character
                    del held[:cut]
                    return head
        return ""

    def _text(self, ids: list[int]) -> str:
        return self._id_text.decode(self._anchor + ids)[self._num_anchor_chars :] if ids else ""

    def _set_anchor(self, anchor: list[int]) -> None:
        self._anchor = anchor
        self._num_anchor_chars = len(self._id_text.decode(anchor)) if anchor else 0
        # An anchor that shows no text may leave the first place of the text, and its rules, to the next id.
        self._known = self._id_text.whole if self._num_anchor_chars else None

    def _before_stop(self, text: str) -> str:
        """Add to the withheld text; return what is certain to come before any stop string."""
        if not self._stop:
            return text
        text = self._withheld + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._withheld = True, ""
            self._held.clear()
            end, start = min(found)
            return text[: end if self._include_stop else start]
        num_withheld = max(_overlap(text, stop) for stop in self._stop)
        cut = len(text) - num_withheld
        self._withheld = text[cut:]
        return text[:cut]


def _last_whole_id(id_text: IdText, prompt_ids: Sequence[int]) -> list[int]:
    """The last prompt id with text of its own that ends in a whole character; empty if there is none."""
    for token_id in reversed(prompt_ids):
        apart = token_id in id_text.silent_ids or token_id in id_text.byte_ids
        if not apart and token_id < id_text.vocab_size and not id_text.decode([token_id]).endswith(SPLIT_CHARACTER):
            return [token_id]
    return []


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
