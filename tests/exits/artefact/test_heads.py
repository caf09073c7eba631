"""Exit heads of every kind: what an untrained one yields, what a distance of 0 hides, what attention is handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exits.artefact.artefact_factory import MAX_DISTANCE, make_head, make_spec
from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import ExitHead, HeadSpec

WIDTH, INNER, NUM_TOKENS = 48, 20, 9
KINDS = [
    ("identity", False),
    *((kind, deep) for kind in ("affine", "mlp", "block", "narrow") for deep in (False, True)),
]
kinds = pytest.mark.parametrize(("kind", "deep"), KINDS)


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over the tokens of one row, [T, H, S]."""
    q, k, v = (part.transpose(0, 1).float() for part in (query, key, value))
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).to(query.dtype)


def spec_of(kind: str = "block", **settings: Any) -> HeadSpec:
    """`make_spec`; a narrow head is a block with an inner width."""
    return make_spec("block", inner=INNER, **settings) if kind == "narrow" else make_spec(kind, **settings)


class Cached:
    """Attention of a single token over all that came before, as a decoder keeps it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        k, v = torch.cat(self.keys), torch.cat(self.values)
        groups = query.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        weights = (torch.einsum("qhs,khs->hqk", query, k) * query.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("hqk,khs->qhs", weights, v)


def inputs(*, deep: bool, dtype: torch.dtype = torch.float32, distance: int = 1, width: int = WIDTH) -> tuple[Any, ...]:
    """`width`: of the deep state."""
    generator = torch.Generator().manual_seed(0)
    states, other = torch.randn(2, NUM_TOKENS, WIDTH, generator=generator).to(dtype)
    return (states, other[:, :width].contiguous(), torch.full((NUM_TOKENS,), distance)) if deep else (states,)


def inputs_of(head: ExitHead, **how: Any) -> tuple[Any, ...]:
    return inputs(deep=head.spec.deep, width=head.spec.inner_width, **how)


def features(head: ExitHead, *given: Tensor) -> Tensor:
    return head.widen(head.refine(head.embed(*given), torch.arange(NUM_TOKENS), dense), given[0])


@kinds
def test_an_untrained_head_of_any_kind_guesses_the_normed_state(kind: str, deep: bool) -> None:
    head = ExitHead(spec_of(kind, deep=deep))
    given = inputs_of(head)
    expected = given[0] if kind == "identity" else head.state_norm(given[0])
    assert torch.allclose(features(head, *given), expected, atol=1e-6)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_features_have_the_shape_and_dtype_of_the_states_and_agree_between_dtypes(
    kind: str, deep: bool, dtype: torch.dtype
) -> None:
    head = make_head(spec_of(kind, deep=deep))
    expected = features(head, *inputs_of(head))
    out = features(head.to(dtype), *inputs_of(head, dtype=dtype))
    assert (out.shape, out.dtype) == ((NUM_TOKENS, WIDTH), dtype)
    assert torch.allclose(out.float(), expected, atol=0.1, rtol=0.05)


@kinds
def test_every_weight_of_a_head_changes_its_features(kind: str, deep: bool) -> None:
    head = make_head(spec_of(kind, deep=deep))
    given = inputs_of(head)
    before = features(head, *given)
    for name, weight in head.named_parameters():
        if name.startswith("fuse."):  # it makes the deep state
            continue
        kept = weight.clone()
        weight += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        assert not torch.equal(features(head, *given), before), name
        weight.copy_(kept)
    assert torch.equal(features(head, *given), before)


@pytest.mark.parametrize("kind", ["affine", "mlp", "block", "narrow"])
def test_at_distance_0_the_deep_state_is_ignored_even_if_it_is_nan(kind: str) -> None:
    head = make_head(spec_of(kind))
    states, other, none = inputs_of(head, distance=0)
    expected = features(head, states, other, none)
    assert torch.equal(features(head, states, other.fill_(torch.nan), none), expected)


def test_gradients_do_not_see_the_deep_state_at_distance_0() -> None:
    head = make_head(make_spec("mlp")).requires_grad_(True)
    states, other, distances = inputs(deep=True)
    other[0], distances[0] = torch.nan, 0
    features(head, states, other, distances).sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in head.parameters() if weight.grad is not None)
    assert head.deep_norm.weight.grad is not None


def test_distances_are_told_apart_up_to_the_farthest_known_one() -> None:
    head = make_head(make_spec("affine"))
    by_distance = [features(head, *inputs(deep=True, distance=j)) for j in range(MAX_DISTANCE + 3)]
    for near in range(MAX_DISTANCE):
        assert not torch.allclose(by_distance[near], by_distance[near + 1])
    assert torch.equal(by_distance[MAX_DISTANCE], by_distance[MAX_DISTANCE + 2])


@kinds
def test_a_tokens_features_do_not_depend_on_the_tokens_beside_it_but_through_attention(kind: str, deep: bool) -> None:
    head = make_head(spec_of(kind, deep=deep))
    given = inputs_of(head)
    alone = head.embed(*(part[4:5] for part in given))
    assert torch.allclose(head.embed(*given)[4:5], alone, atol=1e-6)


def test_a_block_run_at_once_equals_the_block_run_token_by_token() -> None:
    head, given = make_head(make_spec("block")), inputs(deep=True)
    embedded, positions, cached = head.embed(*given), torch.arange(NUM_TOKENS), Cached()
    one_by_one = [head.refine(embedded[t : t + 1], positions[t : t + 1], cached) for t in range(NUM_TOKENS)]
    assert torch.allclose(torch.cat(one_by_one), head.refine(embedded, positions, dense), atol=1e-5)


def test_keys_values_are_those_that_refine_projects() -> None:
    head, given = make_head(make_spec("block")), inputs(deep=True)
    embedded, positions = head.embed(*given), torch.arange(NUM_TOKENS) + 100
    seen: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.extend((key, value))
        return query

    head.refine(embedded, positions, attend)
    key, value = head.keys_values(embedded, positions)
    assert key.shape == value.shape == (NUM_TOKENS, 2, 12)
    assert torch.equal(key, seen[0])
    assert torch.equal(value, seen[1])


def test_block_attention_depends_on_how_far_tokens_are_apart_and_not_on_where_they_are() -> None:
    head, given = make_head(make_spec("block")), inputs(deep=True)
    embedded, positions = head.embed(*given), torch.arange(NUM_TOKENS)
    here = head.refine(embedded, positions, dense)
    assert torch.allclose(head.refine(embedded, positions + 1000, dense), here, atol=1e-3)
    assert not torch.allclose(head.refine(embedded, positions * 7, dense), here, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "linear"}, "head.kind"),
        ({"width": 0}, "head.width"),
        ({"width": True}, "head.width"),
        ({"width": 48.0}, "head.width"),
        ({"width": 2**21}, "head.width"),
        ({"hidden": -1}, "head.hidden"),
        ({"kind": "mlp", "hidden": 0}, "head.hidden"),
        ({"hidden": 8}, "head.hidden"),
        ({"deep": True}, "head.max_distance"),
        ({"max_distance": 4}, "head.max_distance"),
        ({"kind": "identity", "deep": True, "max_distance": 4}, "head.max_distance"),
        ({"num_heads": 4}, "head.num_heads"),
        ({"kind": "block"}, "head.num_heads"),
        ({"kind": "block", "num_heads": 4, "num_kv_heads": 3, "head_size": 8, "ffn": 8}, "head.num_heads"),
        ({"kind": "block", "num_heads": 4, "num_kv_heads": 2, "head_size": 7, "ffn": 8}, "head.num_heads"),
        ({"rope_theta": 0.0}, "head.rope_theta"),
        ({"norm_eps": float("nan")}, "head.norm_eps"),
        ({"inner": 24}, "head.inner"),
        ({"kind": "block", "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "ffn": 8, "inner": 49}, "head.inner"),
    ],
    ids=str,
)
def test_a_head_that_cannot_be_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HeadSpec(**{"kind": "affine", "width": 48, **settings})
    assert named in caught.value.field


def test_an_untrained_head_takes_the_last_state_for_the_deep_state() -> None:
    head = ExitHead(make_spec(taps=(2, 3)))
    last, *tapped = torch.randn(3, NUM_TOKENS, WIDTH)
    torch.testing.assert_close(head.deep_state(last, tapped), last)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_tap_and_the_last_state_matter_to_the_deep_state(which: int) -> None:
    head = make_head(make_spec(taps=(2, 3)))
    states = list(torch.randn(3, NUM_TOKENS, WIDTH))
    before = head.deep_state(states[0], states[1:])
    states[which] = states[which] + torch.randn(NUM_TOKENS, WIDTH)
    assert (head.deep_state(states[0], states[1:]) - before).abs().max() > 1e-3


def test_what_only_positions_that_run_deep_need_is_no_cost_of_a_draft() -> None:
    plain, tapped = ExitHead(make_spec()), ExitHead(make_spec(taps=(2, 3)))
    assert plain.num_draft_parameters == plain.num_parameters
    assert tapped.num_draft_parameters == plain.num_parameters + 2 * WIDTH  # the norms of the taps
    assert tapped.num_parameters - tapped.num_draft_parameters == 3 * WIDTH * WIDTH + WIDTH


@pytest.mark.parametrize("taps", [(0,), (3, 2), (2, 2), (2.0,), [2], (True,), tuple(range(1, 30))], ids=str)
def test_taps_that_cannot_be_are_refused(taps: Any) -> None:
    with pytest.raises(ConfigError, match="taps"):
        make_spec(taps=taps)


def test_a_head_without_the_deep_state_has_no_taps() -> None:
    with pytest.raises(ConfigError, match="taps"):
        make_spec(deep=False, taps=(2,))


@pytest.mark.parametrize("taps", [(), (2, 3)], ids=str)
def test_the_deep_state_of_a_narrow_head_is_as_wide_as_the_head_and_made_of_all_it_is_given(
    taps: tuple[int, ...],
) -> None:
    head = make_head(spec_of("narrow", taps=taps))
    states = list(torch.randn(1 + len(taps), NUM_TOKENS, WIDTH))
    before = head.deep_state(states[0], states[1:])
    assert before.shape == (NUM_TOKENS, head.spec.deep_width) == (NUM_TOKENS, INNER)
    for which in range(len(states)):
        others = [state + (place == which) for place, state in enumerate(states)]
        assert (head.deep_state(others[0], others[1:]) - before).abs().max() > 1e-3


def test_an_inner_width_as_wide_as_the_model_is_no_narrow_head() -> None:
    same, plain = make_spec(inner=WIDTH), make_spec()
    assert not same.narrow
    assert list(ExitHead(same).state_dict()) == list(ExitHead(plain).state_dict())


def test_a_narrow_head_of_a_wide_model_has_a_tenth_of_the_weights() -> None:
    """The 7.25B: width 4608, feed-forward 12288. Ninety megabytes in place of 667."""
    taps = (10, 20)
    blocks = {"kind": "block", "width": 4608, "deep": True, "max_distance": 5, "head_size": 64, "taps": taps}
    with torch.device("meta"):
        wide = ExitHead(HeadSpec(num_heads=72, num_kv_heads=24, ffn=12288, **blocks))
        narrow = ExitHead(HeadSpec(num_heads=18, num_kv_heads=6, ffn=3072, inner=1152, **blocks))
    assert 300e6 < wide.num_parameters < 350e6
    assert narrow.num_parameters < 45e6
    assert narrow.num_draft_parameters < wide.num_draft_parameters / 8
