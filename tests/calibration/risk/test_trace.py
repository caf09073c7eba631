"""Traces hold the predictions of the candidate and the model, at the positions of the continuations only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.calibration.train.heads import SHORTLIST, tiny_adapter, write_sequences
from tide_core.calibration.collect.shards import TokenShards
from tide_core.calibration.risk.trace import trace_candidates
from tide_core.calibration.train.candidates import Candidate, CandidateSpec, make_candidate
from tide_core.calibration.train.chain import features_by_distance
from tide_core.exits.artefact.router import confidence_of
from tide_core.models.adapter import ModelAdapter

DRAFTS = 3


def make(adapter: ModelAdapter, name: str) -> Candidate:
    """Untrained, but with nothing idle in it."""
    spec = CandidateSpec.parse(name)
    candidate = make_candidate(adapter, spec, max_distance=DRAFTS, bottleneck=8, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (*candidate.head.parameters(), *candidate.router.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return candidate


def one_by_one(
    adapter: ModelAdapter, candidate: Candidate, shards: TokenShards, index: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same from the library's own outputs, for one sequence alone."""
    sequence = shards.sequence(index)
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    out = adapter.model(tokens, output_hidden_states=True, use_cache=False)
    states = out.hidden_states[candidate.layer]
    tapped = [out.hidden_states[tap] for tap in candidate.head.spec.taps]
    deep = candidate.head.deep_state(out.hidden_states[-1], tapped)
    agrees, scores = [], []
    for features in features_by_distance(candidate.head, states, deep, range(1, DRAFTS + 1)).values():
        logits = adapter.head(adapter.norm(features))[:, SHORTLIST]
        window = slice(sequence.prompt_len - 1, len(sequence.tokens) - 1)
        agrees.append((SHORTLIST[logits.argmax(-1)] == out.logits[0].argmax(-1))[window])
        scores.append(candidate.router.score(features, confidence_of(logits))[window])
    return torch.stack(agrees).numpy(), torch.stack(scores).detach().numpy()


@pytest.mark.parametrize(
    "name",
    ["2:block:deep", "1:block:deep:taps=2+3", "2:block:deep:hidden=16:taps=0", "1:block", "3:identity", "2:mlp:deep"],
)
def test_traces_are_those_of_each_sequence_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_core.calibration.risk.trace.BATCH_TOKENS", 64)
    adapter = tiny_adapter()
    shards = write_sequences(tmp_path, "test", 7)
    candidate = make(adapter, name)
    [traces] = trace_candidates(adapter, [candidate], shards, SHORTLIST, DRAFTS)
    assert (traces.name, traces.layer, traces.kind) == (candidate.name, candidate.layer, candidate.kind)
    assert len(traces.sequences) == shards.num_sequences
    for index, got in enumerate(traces.sequences):
        agree, score = one_by_one(adapter, candidate, shards, index)
        assert got.agree.shape == (DRAFTS, len(shards.sequence(index).tokens) - shards.sequence(index).prompt_len)
        assert np.array_equal(got.agree, agree)
        np.testing.assert_allclose(got.score, score, atol=1e-5)


def shortlist_share(adapter: ModelAdapter, shards: TokenShards) -> float:
    """Share of the full-depth tokens that are in the shortlist."""
    inside = []
    for index in range(shards.num_sequences):
        sequence = shards.sequence(index)
        top = adapter.model(torch.from_numpy(sequence.tokens.astype(np.int64))[None]).logits[0].argmax(-1)
        inside.append(torch.isin(top[sequence.prompt_len - 1 : -1], SHORTLIST).numpy())
    return float(np.concatenate(inside).mean())


def test_a_head_that_is_the_rest_of_the_model_agrees_wherever_the_shortlist_allows(tmp_path: Path) -> None:
    """The last layer's output, were it a checkpoint, is what the identity head turns into full-depth tokens."""
    adapter = tiny_adapter()
    shards = write_sequences(tmp_path, "test", 9)
    perfect = make(adapter, "3:identity")
    perfect = Candidate(adapter.num_layers, "identity", perfect.head, perfect.router, "all layers")
    [traces] = trace_candidates(adapter, [perfect], shards, SHORTLIST, 2)
    agrees = np.concatenate([sequence.agree[0] for sequence in traces.sequences])
    assert 0.1 < agrees.mean() < 0.9
    assert agrees.mean() == pytest.approx(shortlist_share(adapter, shards))


def test_a_part_without_sequences_has_empty_traces(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    shards = TokenShards(tmp_path, "test")
    [traces] = trace_candidates(adapter, [make(adapter, "1:affine")], shards, SHORTLIST, 2)
    assert traces.sequences == []


@pytest.mark.parametrize("name", ["2:block:deep", "2:identity", "2:affine"])
def test_a_model_in_bfloat16_is_traced_with_logits_in_float32(tmp_path: Path, name: str) -> None:
    adapter = tiny_adapter(dtype=torch.bfloat16)
    [traces] = trace_candidates(adapter, [make(adapter, name)], write_sequences(tmp_path, "test", 3), SHORTLIST, DRAFTS)
    scores = np.concatenate([sequence.score for sequence in traces.sequences], axis=1)
    assert np.isfinite(scores).all()
