"""Use of API keys: counted by name, with a bound."""

from router.gateway.metrics.series import OTHER, KeyUsage
from tests.kits.router.gateway import LENGTH, FakeRouter, make_app, post, samples, tokens


def series(usage: KeyUsage, name: str) -> dict[str, float]:
    families = {family.name: family for family in usage.families()}
    return {sample.labels["key"]: sample.value for sample in families[name].samples}


def test_keys_beyond_the_bound_share_a_series():
    usage = KeyUsage(max_shown=2)
    for key in ("a", "b", "c", "d", "a"):
        usage.of(key).num_requests += 1
    assert series(usage, "baton_key_requests") == {"a": 2, "b": 1, OTHER: 2}
    assert usage.of("e") is usage.of("f")


def test_a_request_counts_as_the_use_of_its_key():
    router = FakeRouter([tokens("ab"), tokens("c", outcome=LENGTH)])
    app = make_app(router)
    post(app, "/v1/completions", {"prompt": "yo", "n": 2})
    post(app, "/v1/completions", {"prompt": "yo", "temperature": "hot"})  # invalid
    found = samples(app)
    anonymous = ("key", "")
    assert found["baton_key_requests_total"] == {(anonymous,): 1.0}
    assert found["baton_key_tokens_total"] == {
        (anonymous, ("kind", "prompt")): 2.0,
        (anonymous, ("kind", "generation")): 6.0,
    }
