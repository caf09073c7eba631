"""Servers that do what they are told: a gRPC one and an HTTP one on loopback, for tests of whoever asks them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tide.v1 import tide_pb2 as pb
from tide.v1 import tide_pb2_grpc

NUM_LAYERS = 4
PATIENCE_S = 60.0
"""Bounds a hang: whatever a test waits for comes much sooner."""
TOKENS = (
    pb.Token(id=5, text="The", exit_layer=4, audit=pb.AUDIT_VERIFIED, mode=pb.MODE_BOUNDED),
    pb.Token(id=6, text=" cat", exit_layer=1, score=0.75, audit=pb.AUDIT_AGREED, mode=pb.MODE_BOUNDED),
    pb.Token(id=7, text=" sat", exit_layer=1, score=0.5, audit=pb.AUDIT_DISAGREED, gap=0.125, mode=pb.MODE_BOUNDED),
    pb.Token(id=8, text=".", exit_layer=4, audit=pb.AUDIT_VERIFIED, mode=pb.MODE_BOUNDED),
)
TEXT = "The cat sat."
FINAL = pb.Final(
    finish_reason=pb.FINISH_REASON_STOP,
    usage=pb.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1, queue_s=0.5, first_token_s=1.0, total_s=2.0),
    exits=pb.ExitSummary(
        layers_per_token=2.5, tokens_per_deep_pass=2.0, drafts=3, accepted=2, tokens_per_layer={4: 2, 1: 2}, differing=1
    ),
    artefact_digest="d" * 64,
    model="scripted",
)

Chunks = Iterator[pb.GenerateChunk]
Act = Callable[["Script", grpc.ServicerContext], Chunks]
"""How one call is answered."""


def chunk(sequence: int, *tokens: pb.Token, final: pb.Final | None = None) -> pb.GenerateChunk:
    return pb.GenerateChunk(request_id="r-1", sequence=sequence, tokens=tokens, final=final)


def whole(script: Script, context: grpc.ServicerContext) -> Chunks:
    """The first token alone, then two at once, then the last with the last word."""
    yield chunk(0, TOKENS[0])
    yield chunk(1, *TOKENS[1:3])
    yield chunk(2, TOKENS[3], final=FINAL)


def fails(code: str, after: int = 0, *, opens: bool = False, retry_after: str | None = None) -> Act:
    """A status after so many tokens; `opens`: after a first chunk without any."""

    def act(script: Script, context: grpc.ServicerContext) -> Chunks:
        if opens:
            yield chunk(0)
        for index in range(after):
            yield chunk(index, TOKENS[index])
        if retry_after is not None:
            context.set_trailing_metadata([("retry-after", retry_after)])
        context.abort(grpc.StatusCode[code], f"scripted {code}")

    return act


def fails_after_the_last_word(script: Script, context: grpc.ServicerContext) -> Chunks:
    yield from whole(script, context)
    context.abort(grpc.StatusCode.UNAVAILABLE, "too late to matter")


def skips(script: Script, context: grpc.ServicerContext) -> Chunks:
    """Loses the second of three chunks."""
    yield from (part for part in whole(script, context) if part.sequence != 1)


def skips_and_hangs(script: Script, context: grpc.ServicerContext) -> Chunks:
    yield from skips(script, context)
    script.released.wait()


def repeats(script: Script, context: grpc.ServicerContext) -> Chunks:
    yield chunk(0, TOKENS[0])
    yield chunk(0, TOKENS[0])


def goes_on_after_the_last_word(script: Script, context: grpc.ServicerContext) -> Chunks:
    yield from whole(script, context)
    yield chunk(3, TOKENS[0])


def ends_without_the_last_word(script: Script, context: grpc.ServicerContext) -> Chunks:
    yield chunk(0, *TOKENS[:2])


def hangs(after: int = 1) -> Act:
    """So many tokens, then nothing until the client goes or the script is let go."""

    def act(script: Script, context: grpc.ServicerContext) -> Chunks:
        for index in range(after):
            yield chunk(index, TOKENS[index])
        script.released.wait()

    return act


def never_ends(script: Script, context: grpc.ServicerContext) -> Chunks:
    sequence = 0
    while context.is_active():
        yield chunk(sequence, TOKENS[sequence % 4])
        sequence += 1
        script.released.wait(0.005)


class Script(tide_pb2_grpc.TideServiceServicer):
    """Answers calls of `Generate` and `GenerateStream` with `acts` in their order, and well when they are used up."""

    def __init__(self) -> None:
        self.acts: deque[Act] = deque()
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.deadlines_s: list[float] = []
        self.ends: queue.Queue[str] = queue.Queue()
        """For each call that ended: answered, or gone if its client went first."""
        self.released = threading.Event()
        self.on_tokenize: Callable[[], object] = lambda: None
        """Runs before a call of `Tokenize` is answered."""

    def until_asked(self, num: int = 1) -> None:
        """Wait until so many requests have come."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.requests) < num:
            assert time.monotonic() < deadline, f"{len(self.requests)} of {num} requests in {PATIENCE_S} s"
            time.sleep(0.01)

    def GenerateStream(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Chunks:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines_s.append(context.time_remaining())
        act = self.acts.popleft() if self.acts else whole
        answered = threading.Event()
        context.add_callback(lambda: self.ends.put("answered" if answered.is_set() else "gone"))
        try:
            yield from act(self, context)
        finally:
            if context.is_active():
                answered.set()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        chunks = list(self.GenerateStream(request, context))
        tokens = [token for part in chunks for token in part.tokens]
        final = chunks[-1].final if chunks[-1].HasField("final") else None
        return pb.GenerateResponse(request_id="r-1", text=TEXT, tokens=tokens, final=final)

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.GetModelInfoResponse(
            model="scripted",
            num_layers=NUM_LAYERS,
            checkpoint_layers=[1],
            modes=[pb.MODE_FULL, pb.MODE_BOUNDED],
            default_exits=pb.ExitParams(mode=pb.MODE_VERIFIED),
        )

    def GetExitStats(self, request: pb.GetExitStatsRequest, context: Any) -> pb.GetExitStatsResponse:
        audit = pb.AuditReport(contract="fast(0.05)", epsilon=0.05, answers=10, delta=0.05)
        return pb.GetExitStatsResponse(total_tokens=9, tokens_per_layer={4: 2, 1: 7}, audits=[audit])

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=request.request_id == "r-1")

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.on_tokenize()
        text = request.text or "".join(message.content for message in request.chat.messages)
        return pb.TokenizeResponse(ids=[ord(letter) for letter in text])

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.ids)))


class GrpcServer:
    """A script behind a port. Several may listen on the same one, one after another."""

    def __init__(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> None:
        self.script = Script()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        tide_pb2_grpc.add_TideServiceServicer_to_server(self.script, self._server)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """At once, whatever runs."""
        stopped = self._server.stop(None)
        self.script.released.set()
        stopped.wait()
