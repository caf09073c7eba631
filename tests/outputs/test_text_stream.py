"""The text of a request as it comes, against decoding all of it at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tide_core.errors import RequestError
from tide_core.outputs.text import MAX_HELD_IDS, TextStream
from tide_core.outputs.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

Make = Callable[[], Tokenizer]

SPECIAL = ("<s>", "</s>")
LETTERS = ("a", "b", "aa", "ab", "ba", "aab", "abba")
EMOJI = "👩🏽‍🚀"  # fifteen bytes in four characters


def wrap(raw: RawTokenizer) -> Tokenizer:
    raw.add_special_tokens(list(SPECIAL))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>"))


@functools.cache
def byte_level() -> Tokenizer:
    """Every byte is a token, and so is each of LETTERS."""
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*pre_tokenizers.ByteLevel.alphabet(), *LETTERS]))}
    merges = [("a", "a"), ("a", "b"), ("b", "a"), ("aa", "b"), ("ab", "ba")]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return wrap(raw)


@functools.cache
def llama_style() -> Tokenizer:
    """Words carry their space in front, the first one's is dropped, and unknown characters are runs of byte tokens."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi", "é", "�", "x�"]
    vocab = {token: i for i, token in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i")]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return wrap(raw)


@functools.cache
def metaspace() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<unk>", "▁", "h", "i", "▁h", "▁hi", "▁▁"])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[("▁", "h"), ("▁h", "i"), ("▁", "▁")], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return wrap(raw)


@functools.cache
def demo() -> Tokenizer:
    from tide_core.models.loader import load_tokenizer
    from tide_core.models.resolver import resolve

    return Tokenizer(load_tokenizer(resolve("demo")))


TINY = {"byte_level": byte_level, "llama_style": llama_style, "metaspace": metaspace}
ALL = [*TINY.values(), pytest.param(demo, marks=pytest.mark.demo)]
no_deadline = settings(deadline=None)  # the first example loads a tokenizer
every_tokenizer = pytest.mark.parametrize("make", ALL)


def id_lists(tokenizer: Tokenizer, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    """Any ids; the first few hundred, where bytes and special tokens are, come up as often as all the others."""
    top = tokenizer.vocab_size - 1
    return st.lists(st.integers(0, min(top, 300)) | st.integers(0, top), max_size=max_size)


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.finish()]


def added_text(tokenizer: Tokenizer, prompt_ids: list[int], output_ids: list[int]) -> str:
    return tokenizer.decode([*prompt_ids, *output_ids])[len(tokenizer.decode(prompt_ids)) :]


def ends_whole(tokenizer: Tokenizer, prompt_ids: list[int]) -> bool:
    """Whether the next id cannot change what the prompt reads as."""
    spoken = [i for i in prompt_ids if tokenizer.decode([i]) or i not in tokenizer._id_text.silent_ids]
    if not spoken:
        return True
    return spoken[-1] not in tokenizer._id_text.byte_ids and not tokenizer.decode([spoken[-1]]).endswith("�")


# Joined, the pieces are the text.


@every_tokenizer
@no_deadline
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_text_of_all_ids(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(id_lists(tokenizer))
    assert "".join(run(tokenizer.stream([], ()), ids)) == tokenizer.decode(ids)


@every_tokenizer
@no_deadline
@given(data=st.data())
def test_pieces_after_a_prompt_join_to_what_the_output_adds_to_it(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    prompt_ids = data.draw(id_lists(tokenizer, 5).filter(lambda ids: ends_whole(tokenizer, ids)))
    ids = data.draw(id_lists(tokenizer))
    assert "".join(run(tokenizer.stream(prompt_ids, ()), ids)) == added_text(tokenizer, prompt_ids, ids)


@every_tokenizer
@no_deadline
@given(data=st.data())
def test_ids_that_come_together_read_as_one_by_one(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    prompt, groups = data.draw(id_lists(tokenizer, 8)), data.draw(st.lists(id_lists(tokenizer, 5), max_size=8))
    together, alone = (tokenizer.stream(prompt, ()) for _ in range(2))
    for ids in groups:
        assert together.push_all(ids) == [alone.push(token_id) for token_id in ids]
    assert together.finish() == alone.finish()


@pytest.mark.parametrize("make", [byte_level, llama_style, pytest.param(demo, marks=pytest.mark.demo)])
@no_deadline
@given(text=st.text(max_size=30))
@example(text=EMOJI * 3)
@example(text="日本語 текст é 👩🏽‍🚀!")
def test_pieces_of_valid_text_never_hold_a_split_character(make: Make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    pieces = run(tokenizer.stream([], ()), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "�" not in tokenizer.decode(ids):  # a vocabulary may lack bytes
        assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("make", [byte_level, pytest.param(demo, marks=pytest.mark.demo)])
def test_an_emoji_of_many_tokens_comes_character_by_character(make: Make) -> None:
    tokenizer = make()
    pieces = run(tokenizer.stream([], ()), tokenizer.encode(EMOJI))
    assert len(pieces) > 5
    assert {piece for piece in pieces if piece} <= set(EMOJI)
    assert pieces[-1] == ""


def test_bytes_that_stop_short_of_a_character_come_at_the_end_as_replacements() -> None:
    for tokenizer in (byte_level(), llama_style()):
        ids = tokenizer.encode(EMOJI)[-7:-1]
        pieces = run(tokenizer.stream([], ()), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert pieces[-1].endswith("�")


@pytest.mark.parametrize("num_bad", range(MAX_HELD_IDS - 5, MAX_HELD_IDS + 5))
def test_a_character_after_many_bytes_that_are_not_text_stays_whole(num_bad: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("é")[:1] * num_bad + tokenizer.encode(EMOJI)
    assert "".join(run(tokenizer.stream([], ()), ids)) == "�" * num_bad + EMOJI


def test_finish_twice_releases_nothing_more() -> None:
    stream = byte_level().stream([], ("ab",))
    stream.push(byte_level().encode("a")[0])
    assert stream.finish() == "a"
    assert stream.finish() == ""


# The text of the output follows that of the prompt.


@pytest.mark.parametrize("make", [llama_style, metaspace])
def test_the_first_word_keeps_its_space_after_a_prompt_and_only_there(make: Make) -> None:
    tokenizer = make()
    hi = tokenizer.encode("hi")
    bos = [i for i in tokenizer._id_text.silent_ids if tokenizer._hf.convert_ids_to_tokens(i) == "<s>"]
    assert "".join(run(tokenizer.stream(hi, ()), hi + hi)) == " hi hi"
    assert "".join(run(tokenizer.stream([], ()), hi + hi)) == "hi hi"
    assert "".join(run(tokenizer.stream(bos, ()), hi + hi)) == "hi hi"
    assert "".join(run(tokenizer.stream(hi + bos, ()), hi)) == " hi"


def test_a_character_split_between_prompt_and_output_does_not_harm_what_follows() -> None:
    for tokenizer in (byte_level(), llama_style()):
        ids = tokenizer.encode("hiй")
        tail = tokenizer.encode("hi")
        text = "".join(run(tokenizer.stream(ids[:-1], ()), [ids[-1], *tail]))
        assert text.startswith("�")
        assert text.endswith("hi")


# Texts that are looked up are those that would be decoded.


@functools.cache
def with_suffix() -> Tokenizer:
    """What a token reads as depends on the next one: a space is written only where another word follows."""
    raw = RawTokenizer(models.BPE(vocab={"hi</w>": 0, "h": 1, "ho</w>": 2}, merges=[]))
    raw.decoder = decoders.BPEDecoder()
    return wrap(raw)


@functools.cache
def replacing(pattern: str, content: str) -> Tokenizer:
    raw = RawTokenizer(models.BPE(vocab={"h": 0, "i": 1, "▁": 2}, merges=[]))
    raw.decoder = decoders.Sequence([decoders.Replace(pattern, content), decoders.Fuse()])
    return wrap(raw)


class Changed(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A model's own class may do more than the library when it decodes."""

    def _decode(self, *args: object, **options: object) -> str:
        text: str = super()._decode(*args, **options)
        return text.replace(" ", "_")


def plain_stream(tokenizer: Tokenizer, prompt_ids: list[int], stop: tuple[str, ...]) -> TextStream:
    """One that looks nothing up and decodes by the library's own way."""
    return TextStream(replace(tokenizer._id_text, decode=tokenizer._decode, whole=None), prompt_ids, stop)


@every_tokenizer
@no_deadline
@given(data=st.data())
def test_every_piece_is_the_same_with_and_without_looking_up(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    prompt_ids = data.draw(id_lists(tokenizer, 4))
    ids = data.draw(id_lists(tokenizer, 30))
    text = tokenizer.encode(data.draw(st.text(max_size=10)))
    stop = tuple(data.draw(st.lists(st.text("ahi e", min_size=1, max_size=3), max_size=2)))
    ids = [*ids, *text, *ids]  # the second time there is something to look up
    expected, stream = plain_stream(tokenizer, prompt_ids, stop), tokenizer.stream(prompt_ids, stop)
    for token_id in ids:
        assert (stream.push(token_id), stream.stopped) == (expected.push(token_id), expected.stopped)
    assert (stream.finish(), stream.stopped) == (expected.finish(), expected.stopped)


@pytest.mark.parametrize("make", [byte_level, llama_style, metaspace])
def test_a_text_met_before_is_not_decoded_again_behind_another_anchor(make: Make) -> None:
    tokenizer = make()
    first, other = tokenizer.encode("hi"), tokenizer.encode("h")
    decoded: list[list[int]] = []

    def counting(ids: Sequence[int]) -> str:
        decoded.append(list(ids))
        return tokenizer.decode(ids)

    id_text = replace(tokenizer._id_text, decode=counting, whole={})
    before = run(TextStream(id_text, first, ()), first + other)
    stream = TextStream(id_text, other, ())
    decoded.clear()
    assert run(stream, first + other) == before
    assert decoded == []


def test_nothing_is_looked_up_where_neighbours_may_change_a_text() -> None:
    assert with_suffix()._id_text.whole is None
    assert replacing("hi", "x")._id_text.whole is None
    assert replacing("▁", "")._id_text.whole is None
    assert replacing("▁", " ")._id_text.whole is not None


def test_a_model_class_with_a_way_of_its_own_to_decode_keeps_it() -> None:
    tokenizer = Tokenizer(Changed(tokenizer_object=metaspace()._hf.backend_tokenizer))
    hi = tokenizer.encode("hi")
    assert tokenizer._id_text.whole is None
    assert "".join(run(tokenizer.stream(hi, ()), hi + hi)) == "_hi_hi"


# Stop strings.


def first_complete(text: str, stops: Sequence[str]) -> str | None:
    """What comes before the stop string that is complete first; None without one."""
    for end in range(1, len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(starts)]
    return None


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [i for piece in pieces for i in tokenizer.encode(piece)]


@no_deadline
@given(
    tokens=st.lists(st.sampled_from([*LETTERS, "é", " "]), max_size=20),
    stops=st.lists(st.text("abé ", min_size=1, max_size=5), min_size=1, max_size=4),
)
@example(tokens=["a", "a", "ab"], stops=["aab"])
@example(tokens=["abba"], stops=["abba", "bb"])
def test_text_ends_before_the_stop_string_complete_first_wherever_tokens_begin(
    tokens: list[str], stops: list[str]
) -> None:
    tokenizer = byte_level()
    text = "".join(tokens)
    before = first_complete(text, stops)
    stream = tokenizer.stream([], tuple(stops))
    pushed = ""
    for i in ids_of(tokenizer, *tokens):
        pushed += stream.push(i)
        assert (text if before is None else before).startswith(pushed)  # no part of the stop was let out
    assert stream.stopped == (before is not None)
    assert pushed + stream.finish() == (text if before is None else before)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (("a", "a", "a", "b", "a"), ("aab",), "a"),
        (("aa", "ab", "b"), ("aab",), "a"),
        (("abba",), ("bb",), "a"),
        (("b", "abba"), ("bb", "ab"), "b"),
        (("a", "😀", "b"), ("😀",), "a"),
        (("a", "é", "b", "b"), ("éb",), "a"),
        (("a", "b", "a"), ("b", "aba"), "a"),
        (("a", "b"), ("abb", "bab"), "ab"),
    ],
)
def test_stop_string_examples(pieces: tuple[str, ...], stops: tuple[str, ...], text: str) -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream([], stops)
    assert "".join(run(stream, ids_of(tokenizer, *pieces))) == text
    assert stream.stopped == (text != "".join(pieces))


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (("a", "a", "a", "b", "a"), ("aab",), "aaab"),
        (("abba",), ("bb",), "abb"),
        (("b", "abba"), ("bb", "ab"), "bab"),
        (("b", "abba"), ("ab", "abb"), "bab"),
        (("a", "é", "b", "b"), ("éb",), "aéb"),
        (("a", "b"), ("abb", "bab"), "ab"),
    ],
)
def test_text_ends_with_the_stop_string_for_those_who_ask(
    pieces: tuple[str, ...], stops: tuple[str, ...], text: str
) -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream([], stops, include_stop=True)
    assert "".join(run(stream, ids_of(tokenizer, *pieces))) == text
    assert stream.stopped == (text != "".join(pieces))


def test_only_what_may_begin_a_stop_string_is_withheld() -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream([], ("aab",))
    assert [stream.push(i) for i in ids_of(tokenizer, "b", "a", "a", "a", " ")] == ["b", "", "", "a", "aa "]


def test_nothing_is_released_once_stopped() -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream([], ("b",))
    pieces = run(stream, ids_of(tokenizer, "a", "b", "a", "é", "a"))
    assert pieces == ["a", *[""] * (len(pieces) - 1)]
    assert stream.stopped


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream(ids_of(tokenizer, "b", "a"), ("ab",))
    assert "".join(run(stream, ids_of(tokenizer, "b", "a"))) == "ba"
    assert not stream.stopped


def test_a_stop_string_inside_held_bytes_is_found_at_the_end() -> None:
    tokenizer = llama_style()
    stream = tokenizer.stream([], ("й",))
    assert "".join(run(stream, tokenizer.encode("hiй"))) == "hi"
    assert stream.stopped


@pytest.mark.demo
@no_deadline
@given(text=st.text(max_size=40), data=st.data())
def test_the_demo_model_stops_before_any_part_of_the_text_taken_as_stop(text: str, data: st.DataObject) -> None:
    tokenizer = demo()
    whole = tokenizer.decode(tokenizer.encode(text))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stop = whole[start : start + data.draw(st.integers(1, 5))]
        stream = tokenizer.stream([], (stop,))
        assert "".join(run(stream, tokenizer.encode(text))) == whole[: whole.index(stop)]
        assert stream.stopped


# What it costs, and what it refuses.


def most_ids_decoded(tokenizer: Tokenizer, ids: list[int]) -> int:
    sizes = [0]

    def counting(window: Sequence[int]) -> str:
        sizes.append(len(window))
        return tokenizer.decode(window)

    stream = TextStream(replace(tokenizer._id_text, decode=counting, whole=None), [], ())
    for i in ids:
        stream.push(i)
    return max(sizes)


@pytest.mark.parametrize("text", ["ab ba " * 300, "é😀日" * 200])
def test_a_push_decodes_a_bounded_window_of_text(text: str) -> None:
    assert most_ids_decoded(byte_level(), byte_level().encode(text)) <= 5


def test_a_push_decodes_a_bounded_window_of_bytes_that_are_never_text() -> None:
    byte = byte_level().encode("é")
    assert most_ids_decoded(byte_level(), byte[:1] * 500) <= MAX_HELD_IDS + 2
    assert most_ids_decoded(byte_level(), byte[1:] * 500) <= MAX_HELD_IDS + 2
    run_of_bytes = llama_style().encode("й" * 500)[1:]
    assert most_ids_decoded(llama_style(), run_of_bytes) <= 2


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match="token_id"):
        byte_level().stream([], ()).push(token_id)


def test_an_id_that_pads_the_model_past_its_tokenizer_has_no_text() -> None:
    small = metaspace()
    padded = Tokenizer(small._hf, small.vocab_size + 8)
    ids = [*padded.encode("hi"), small.vocab_size + 7, *padded.encode("hi")]
    assert "".join(run(padded.stream([small.vocab_size], ()), ids)) == padded.decode(ids) == "hi hi"
    with pytest.raises(RequestError):
        padded.stream([], ()).push(padded.vocab_size)


# The bytes of one id, and special tokens as text.


@no_deadline
@given(text=st.text(st.characters() | st.sampled_from(EMOJI), max_size=30))
@pytest.mark.parametrize("make", [byte_level, pytest.param(demo, marks=pytest.mark.demo)])
def test_the_bytes_of_ids_join_to_the_text_even_where_an_id_is_a_part_of_a_character(make: Make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)  # some vocabularies have no id for a rare byte
    assert b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace") == tokenizer.decode(ids)


def test_the_bytes_of_a_llama_style_id_have_its_space() -> None:
    for make in (llama_style, metaspace):
        ids = make().encode("hi hi")
        assert b"".join(map(make().token_bytes, ids)).lstrip() == b"hi hi"
    euro = llama_style().encode("€")
    assert [llama_style().token_bytes(one) for one in euro[-3:]] == [b"\xe2", b"\x82", b"\xac"]


@pytest.mark.parametrize("make", TINY.values())
def test_special_tokens_are_text_for_those_who_ask(make: Make) -> None:
    tokenizer = make()
    vocabulary = tokenizer._hf.get_vocab()
    hi = tokenizer.encode("hi")
    ids = [*hi, vocabulary["</s>"], *hi]
    with_special = "".join(run(tokenizer.stream(hi, skip_special_tokens=False), ids))
    assert "</s>" in with_special
    assert with_special.replace("</s>", "").split() == "".join(run(tokenizer.stream(hi), ids)).split()
