"""A stream put together from its pieces, whoever brings them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tide.v1 import tide_pb2 as pb
from tide_client.errors import BrokenStreamError, TideClientError, count
from tide_client.results import Answer, Token, answer_of, token_of


class Pieces:
    """Tokens that came, in order; then the whole answer, or why there is none. What came before a failure is given out
    before the failure is told, and a failure is told every time."""

    def __init__(self) -> None:
        self.request_id = ""
        self.tokens: list[Token] = []
        self.is_over = False
        """Nothing more will come."""
        self._waiting: deque[Token] = deque()
        self._answer: Answer | None = None
        self._failure: TideClientError | None = None
        self._next_chunk = 0

    @property
    def is_whole(self) -> bool:
        return self._answer is not None

    @property
    def answer(self) -> Answer:
        if self._failure is not None:
            raise self._failure
        if self._answer is None:
            raise TideClientError(f"there is no answer yet: {count(len(self.tokens))} came, and the last word did not")
        return self._answer

    def next_token(self) -> Token | None:
        """The next that came and was not given out yet. Raises the failure once all were."""
        if self._waiting:
            return self._waiting.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def take(self, chunk: pb.GenerateChunk) -> None:
        """A message of a gRPC stream; one with a piece missing before it breaks the stream."""
        if self.is_whole or chunk.sequence != self._next_chunk:
            expected = "nothing" if self.is_whole else str(self._next_chunk)
            self.fail(BrokenStreamError(f"chunk {chunk.sequence} came where {expected} was next"))
            return
        self._next_chunk += 1
        self.request_id = chunk.request_id
        self.add([token_of(token) for token in chunk.tokens])
        if chunk.HasField("final"):
            self.complete(answer_of(chunk.request_id, self.tokens, chunk.final))

    def add(self, tokens: Sequence[Token]) -> None:
        self.tokens += tokens
        self._waiting += tokens

    def complete(self, answer: Answer) -> None:
        """The last word came."""
        self._answer = answer

    def end(self) -> None:
        """The server has nothing more to say. An end without the last word is no end."""
        if not self.is_whole:
            self.fail(BrokenStreamError(f"the stream ended after {count(len(self.tokens))} without its last word"))
        self.is_over = True

    def fail(self, failure: TideClientError) -> None:
        self._failure, self.is_over = failure, True

    def begin_again(self) -> None:
        """For a call that is made again: it counts its chunks from 0. Only before the first token."""
        assert not self.tokens
        self._next_chunk = 0
