"""Versions: shares follow the weights, a key keeps its version, and outcomes are counted."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control import MAIN_LINE
from router.gateway.versions import (
    LONGEST_FOR_S,
    MAX_VERSIONS,
    ServedVersion,
    Tallies,
    Versions,
    by_weight,
)
from router.inbox.api_errors import ApiError
from tests.kits.router.gateway import (
    TEMPLATE,
    FakeRouter,
    TickingClock,
    get,
    make_app_of,
    post,
    text_model,
)

KEYS = [f"request-{i}" for i in range(4000)]


class NamedRouter(FakeRouter):
    """A router whose fingerprint is the name of its version."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def fingerprint(self) -> str:
        return f"fp-{self.name}"


def served(
    name: str,
    weight: int = 1,
    *,
    model: str = "tiny",
    is_leaving: bool = False,
    line: str = MAIN_LINE,
) -> ServedVersion:
    text = text_model(TEMPLATE)
    return ServedVersion(name, NamedRouter(name), text, (model,), 64, weight, is_leaving, line)


weights = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100), min_size=1).filter(
    lambda shares: any(shares.values())
)


@settings(max_examples=25)  # each example checks thousands of keys
@given(weights)
def test_each_version_has_its_share_of_many_keys(shares):
    counts = Counter(by_weight(shares, key) for key in KEYS)
    total = sum(shares.values())
    for name, weight in shares.items():
        assert abs(counts[name] / len(KEYS) - weight / total) < 0.05
        assert weight or not counts[name]


@given(weights, st.text(max_size=8))
def test_a_key_stays_with_its_version_when_others_lose_or_it_gains(shares, key):
    chosen = by_weight(shares, key)
    assert by_weight(shares, key) == chosen
    assert by_weight({**shares, chosen: shares[chosen] + 50}, key) == chosen
    assert by_weight({n: w for n, w in shares.items() if n == chosen or w % 2}, key) == chosen


def test_without_any_weight_the_first_one_is_chosen():
    assert by_weight({"v1": 0, "v2": 0}, "key") == "v1"


def chosen(versions: Versions, **asked: str) -> set[str]:
    return {versions.choose(key=key, **asked).name for key in KEYS[:50]}


def test_a_model_name_chooses_the_line_and_weights_the_version_within_it():
    versions = Versions(
        served("v1", 50),
        served("v2", 50, model="renamed"),
        served("small-v1", 10, model="small", line="small"),
        served("small-v2", 90, model="small", line="small"),
    )
    assert chosen(versions) == {"v1", "v2"}
    assert chosen(versions, model="tiny") == {"v1", "v2"}
    assert chosen(versions, model="renamed") == {"v2"}
    assert chosen(versions, model="small") == {"small-v1", "small-v2"}
    assert list(versions.models()) == ["tiny", "renamed", "small"]
    assert versions.model_name == "tiny"


def test_a_line_without_a_version_that_stays_takes_no_requests():
    versions = Versions(
        served("v1"), served("small-v1", model="small", line="small", is_leaving=True)
    )
    with pytest.raises(ApiError, match="no worker is known") as caught:
        versions.choose(key="a", model="small")
    assert caught.value.status == 503
    assert chosen(versions) == {"v1"}


def test_a_version_name_or_its_own_model_name_selects_the_version():
    versions = Versions(served("v1"), served("v2", 0), served("v3", model="other"))
    assert chosen(versions) == {"v1", "v3"}
    assert chosen(versions, model="tiny") == {"v1", "v3"}
    assert chosen(versions, version="v2") == {"v2"}
    assert chosen(versions, model="other") == {"v3"}
    assert versions.models() == {"tiny": 64, "other": 64}
    for asked, code in (({"version": "v9"}, "version_not_found"), ({"model": "x"}, "model_not")):
        with pytest.raises(ApiError) as caught:
            versions.choose(key="", **asked)
        assert caught.value.status == 404
        assert caught.value.code.startswith(code)


def test_a_leaving_version_takes_no_requests():
    leaving = served("v2", 0, model="other", is_leaving=True)
    versions = Versions(served("v1"), leaving)
    assert chosen(versions) == {"v1"}
    assert not versions.takes(leaving)
    for asked in ({"version": "v2"}, {"model": "other"}):
        with pytest.raises(ApiError):
            versions.choose(key="", **asked)


def test_a_version_without_workers_is_passed_over_and_counted():
    versions = Versions(served("v1"), served("v2"))
    versions.table[1].port.not_ready = "no decode worker is connected"
    assert chosen(versions) == {"v1"}
    assert versions.counters()["version passed over", "v2"] > 5
    versions.table[0].port.not_ready = "no prefill worker is connected"
    assert chosen(versions) == {"v1", "v2"}
    assert versions.readiness() == "no prefill worker is connected"


def test_counts_of_a_version_stay_when_it_is_gone():
    first, second = served("v1"), served("v2")
    first.port.events["retry", "lost"] = 3
    versions = Versions(first, second)
    versions.follow((second,))
    assert versions.counters() == {("retry", "lost"): 3}


def test_a_new_table_changes_the_choice_at_once():
    versions = Versions(served("v1"))
    assert chosen(versions) == {"v1"}
    versions.follow((served("v1", is_leaving=True), served("v2")))
    assert chosen(versions) == {"v2"}


def test_the_fingerprint_names_the_version_and_the_header_forces_it():
    app = make_app_of(Versions(served("v1", 60), served("v2", 40)), TickingClock())

    def fingerprints(**headers: str) -> set[str]:
        answers = [post(app, "/v1/completions", {"prompt": "yo"}, **headers) for _ in range(20)]
        return {answer.json()["system_fingerprint"] for answer in answers}

    assert fingerprints() == {"fp-v1", "fp-v2"}
    assert fingerprints(x_baton_version="v2") == {"fp-v2"}
    assert len(fingerprints(x_baton_affinity="me")) == 1
    assert post(app, "/v1/completions", {"prompt": "yo"}, x_baton_version="v9").status == 404
    page = get(app, "/metrics").body.decode()
    assert 'baton_version_weight{fingerprint="fp-v2",version="v2"} 40.0' in page
    assert 'baton_version_requests{fingerprint="fp-v1",version="v1"} 0.0' in page
    assert 'baton_version_ended_requests_total{outcome="failed",version="v1"} 0.0' in page


def test_ends_are_counted_by_version():
    tallies = Tallies()
    for failed, late in ((False, False), (True, False), (False, True)):
        tallies.record("v1", failed=failed, late=late, num_tokens=9, now_s=1.0)
    tally = tallies.of("v1")
    assert (tally.ended, tally.failed, tally.late) == (3, 1, 1)
    assert tallies.of("v2").ended == 0


def test_the_longest_sequence_is_forgotten_after_a_while():
    tallies = Tallies()
    tallies.record("v1", failed=False, late=False, num_tokens=900, now_s=10.0)
    tallies.record("v1", failed=False, late=False, num_tokens=20, now_s=LONGEST_FOR_S + 10.0)
    tally = tallies.of("v1")
    assert tally.longest_len(LONGEST_FOR_S + 20.0) == 900
    assert tally.longest_len(2 * LONGEST_FOR_S + 20.0) == 20
    assert tally.longest_len(9 * LONGEST_FOR_S) == 0


def test_versions_that_ended_nothing_for_long_are_forgotten():
    tallies = Tallies()
    for number in range(MAX_VERSIONS + 1):
        tallies.record(f"v{number}", failed=False, late=False, num_tokens=1, now_s=0.0)
    assert tallies.of("v0").ended == 0
    assert tallies.of("v1").ended == 1
