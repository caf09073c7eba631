"""The live policy: defaults of a request, values that a request may give, and checks of the policy itself."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.policy import LivePolicy
from deploy.failures import ForbiddenError, failure_of
from deploy.keys import Caller
from tide_core.errors import ConfigError, RequestError
from tide_core.request import SamplingParams

ANYONE = Caller()


def params_of(policy: dict[str, Any], given: dict[str, Any], caller: Caller = ANYONE) -> SamplingParams:
    return LivePolicy.read(policy).params(given, caller, "verified")


def contract_of(policy: dict[str, Any], given: dict[str, Any], caller: Caller = ANYONE) -> tuple[Any, ...]:
    params = params_of(policy, given, caller)
    return params.mode, params.epsilon, params.threshold, params.min_layers


@pytest.mark.parametrize(
    ("policy", "contract"),
    [
        ({}, ("verified", None, None, 0)),
        ({"mode": "full"}, ("full", None, None, 0)),
        ({"mode": "bounded"}, ("bounded", None, None, 0)),
        ({"mode": "bounded", "epsilon": 0.01}, ("bounded", 0.01, None, 0)),
        ({"mode": "fast", "threshold": 0.9, "min_layers": 4}, ("fast", None, 0.9, 4)),
        ({"mode": "fast", "epsilon": 0.05}, ("fast", 0.05, None, 0)),
        ({"threshold": 0.7}, ("verified", None, 0.7, 0)),
        ({"modes": ["full", "fast"]}, ("full", None, None, 0)),
        ({"modes": ["fast"]}, ("fast", None, None, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("silent", [{}, {"mode": None, "epsilon": None, "threshold": None, "min_layers": None}])
def test_a_silent_request_gets_the_policy(
    policy: dict[str, Any], contract: tuple[Any, ...], silent: dict[str, Any]
) -> None:
    assert contract_of(policy, silent) == contract


def test_without_an_artefact_a_silent_request_runs_at_full_depth() -> None:
    assert LivePolicy().params({}, ANYONE, "full").mode == "full"


def test_a_request_that_names_a_mode_gets_that_and_nothing_of_another_mode() -> None:
    policy = {"mode": "fast", "threshold": 0.9}
    assert contract_of(policy, {"mode": "verified"}) == ("verified", None, None, 0)
    assert contract_of(policy, {"mode": "bounded", "epsilon": 0.05}) == ("bounded", 0.05, None, 0)


def test_a_request_that_names_no_mode_keeps_the_policys_and_changes_the_rest() -> None:
    assert contract_of({"mode": "fast", "threshold": 0.9}, {"threshold": 0.5}) == ("fast", None, 0.5, 0)
    assert contract_of({"mode": "bounded", "epsilon": 0.01}, {"min_layers": 3}) == ("bounded", 0.01, None, 3)
    assert contract_of({"mode": "bounded", "epsilon": 0.01}, {"epsilon": 0.05}) == ("bounded", 0.05, None, 0)


def test_a_bound_without_its_mode_is_refused_and_says_so() -> None:
    with pytest.raises(RequestError, match="mode bounded or fast with it; the mode is not given"):
        params_of({}, {"epsilon": 0.05})


def test_other_parameters_pass_through() -> None:
    params = params_of({"mode": "full"}, {"max_tokens": 7, "temperature": 0.5, "seed": 1, "stop": ("a",)})
    assert params == SamplingParams(max_tokens=7, temperature=0.5, seed=1, stop=("a",), mode="full")


@pytest.mark.parametrize(("asked", "run"), [(None, 4), (2, 4), (4, 4), (9, 9)])
def test_no_request_leaves_before_the_layers_of_the_policy(asked: int | None, run: int) -> None:
    assert params_of({"min_layers": 4}, {"mode": "fast", "min_layers": asked}).min_layers == run


@pytest.mark.parametrize("floor", [0, 4])
def test_a_bad_number_of_layers_is_not_hidden_by_the_policys(floor: int) -> None:
    with pytest.raises(RequestError, match="min_layers"):
        params_of({"min_layers": floor}, {"min_layers": -1})


def test_a_mode_that_the_policy_leaves_out_is_forbidden_to_those_who_name_it() -> None:
    with pytest.raises(ForbiddenError, match="mode: got 'fast', expected one of full, verified"):
        params_of({"modes": ["full", "verified"]}, {"mode": "fast"})


def test_a_key_may_have_fewer_modes_and_then_is_never_given_another() -> None:
    caller = Caller("team-a", "salt", modes=("full", "bounded"))
    with pytest.raises(ForbiddenError, match="one of full, bounded"):
        params_of({}, {"mode": "verified"}, caller)
    assert contract_of({}, {}, caller) == ("full", None, None, 0)
    assert contract_of({"mode": "fast", "threshold": 0.9}, {}, caller) == ("full", None, None, 0)
    assert contract_of({"threshold": 0.9}, {}, caller) == ("full", None, None, 0)
    assert contract_of({"mode": "bounded", "epsilon": 0.01}, {}, caller) == ("bounded", 0.01, None, 0)


def test_a_key_without_any_mode_that_the_policy_allows_gets_none() -> None:
    with pytest.raises(ForbiddenError, match="one of none"):
        params_of({"modes": ["full"]}, {}, Caller("team-a", "salt", modes=("fast",)))


@pytest.mark.parametrize(
    ("policy_floor", "key_floor", "asked", "allowed"),
    [
        (0.0, 0.0, 0.0, True),
        (0.5, 0.0, 0.4, False),
        (0.0, 0.5, 0.4, False),
        (0.3, 0.5, 0.5, True),
        (0.5, 0.3, 0.4, False),
    ],
)
def test_a_threshold_below_the_floor_of_policy_or_key_is_forbidden(
    policy_floor: float, key_floor: float, asked: float, allowed: bool
) -> None:
    caller = Caller("team-a", "salt", min_threshold=key_floor)
    policy = {"min_threshold": policy_floor}
    if allowed:
        assert params_of(policy, {"mode": "fast", "threshold": asked}, caller).threshold == asked
    else:
        with pytest.raises(ForbiddenError, match=r"at least 0\.5") as refused:
            params_of(policy, {"mode": "fast", "threshold": asked}, caller)
        failure = failure_of(refused.value, "id")
        assert (failure.status, failure.grpc_code, failure.field) == (403, "PERMISSION_DENIED", "threshold")


def test_a_silent_request_of_a_key_with_a_floor_gets_the_policys_threshold_raised_to_it() -> None:
    caller = Caller("team-a", "salt", min_threshold=0.8)
    assert params_of({"mode": "fast", "threshold": 0.5}, {}, caller).threshold == 0.8
    assert params_of({"mode": "fast", "threshold": 0.9}, {}, caller).threshold == 0.9
    assert params_of({"mode": "fast"}, {}, caller).threshold is None, "as calibrated"


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"exit_treshold": 0.5}, "did you mean min_threshold"),
        ({"tresholds": 0.5}, "did you mean threshold?"),
        ({"mod": "full"}, "did you mean mode"),
        ({"mode": "fst"}, "user_config.mode"),
        ({"mode": "fast", "modes": ["full"]}, "user_config.mode"),
        ({"mode": False}, "user_config.mode"),
        ({"modes": []}, "user_config.modes"),
        ({"modes": ["fst"]}, "user_config.modes"),
        ({"modes": "full"}, "user_config.modes"),
        ({"epsilon": 0.02}, "user_config.epsilon"),
        ({"mode": "verified", "epsilon": 0.02}, "user_config.epsilon"),
        ({"mode": "bounded", "epsilon": 0}, "user_config.epsilon"),
        ({"mode": "bounded", "epsilon": float("nan")}, "user_config.epsilon"),
        ({"mode": "bounded", "epsilon": "1e-3"}, "user_config.epsilon"),
        ({"mode": "full", "threshold": 0.5}, "user_config.threshold"),
        ({"threshold": 2.5}, "user_config.threshold"),
        ({"threshold": float("inf")}, "user_config.threshold"),
        ({"threshold": 0.4, "min_threshold": 0.5}, "user_config.threshold"),
        ({"min_threshold": -1}, "user_config.min_threshold"),
        ({"min_threshold": 3}, "user_config.min_threshold"),
        ({"min_layers": -1}, "user_config.min_layers"),
        ({"min_layers": 2.0}, "user_config.min_layers"),
        ({"min_layers": True}, "user_config.min_layers"),
        ({"artefact": ""}, "user_config.artefact"),
        ({"artefact": 3}, "user_config.artefact"),
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_kept_is_refused_by_name(policy: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LivePolicy.read(policy)
    assert named in str(refused.value)


def test_a_policy_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LivePolicy().mode = "fast"  # type: ignore[misc]


def test_the_margin_of_a_policy_goes_with_its_epsilon() -> None:
    policy = LivePolicy.read({"mode": "bounded", "epsilon": 0.1, "margin": 0.5})
    params = policy.params({}, ANYONE)
    assert (params.mode, params.epsilon, params.margin) == ("bounded", 0.1, 0.5)
    assert policy.params({"margin": 1.0}, ANYONE).margin == 1.0
    assert policy.params({"mode": "verified"}, ANYONE).margin is None
    with pytest.raises(ConfigError, match=r"user_config\.margin"):
        LivePolicy.read({"mode": "verified", "margin": 0.5})
