"""Priority, tenant and SLO fields of a request, and the decision header."""

import msgspec
import pytest

from router.machine.requests import Rejected, Update
from router.policies.base import Decision
from tests.kits.router.access import key_file
from tests.kits.router.gateway import (
    STOP,
    TIMELINE,
    FakeRouter,
    answer,
    chat,
    complete,
    make_app,
    post,
    tokens,
)

DECISION = Decision(
    policy="slo",
    why="least predicted time\nto the first token",
    prefill_worker="p0",
    decode_worker="d1",
    num_candidates=2,
    num_matched_tokens=32,
    pulled_from="p1",
    num_pulled_tokens=16,
    predicted_ttft_s=0.25,
    predicted_tpot_s=0.0125,
)
PLACED = msgspec.structs.replace(TIMELINE, decision=DECISION)
SCRIPT = [tokens("a", timeline=PLACED), tokens("b"), tokens("c", outcome=STOP, timeline=PLACED)]
HEADER = "x-baton-decision"


def asked(fields, *, keys=None, min_priority=0, **headers):
    """Returns the request that the router received."""
    router = FakeRouter()
    app = make_app(router, keys=keys, min_priority=min_priority)
    reply = post(app, "/v1/completions", {"prompt": "yo", **fields}, **headers)
    assert reply.status == 200
    return router.requests[0]


# ---------------------------------------------------------------- service class


def test_a_request_without_service_fields_has_the_defaults():
    request = asked({})
    assert (request.priority, request.tenant) == (0, "")
    assert (request.deadline_s, request.tpot_bound_s) == (None, None)


def test_bounds_are_milliseconds_from_when_the_request_came_in():
    request = asked({"slo_ttft_ms": 1500, "slo_tpot_ms": 12.5})
    assert request.deadline_s == request.received_s + 1.5
    assert request.tpot_bound_s == 0.0125


def test_all_choices_of_an_answer_are_of_one_class():
    router = FakeRouter()
    fields = {"n": 2, "priority": 5, "user": "me", "slo_ttft_ms": 100}
    assert complete(router, fields).status == 200
    first, second = router.requests
    assert (second.priority, second.tenant) == (first.priority, first.tenant) == (5, "me")
    assert second.deadline_s == first.deadline_s


def test_clients_may_step_back_and_overtake_only_where_the_operator_allows_it():
    assert asked({"priority": 7}).priority == 7
    assert asked({"priority": -3}, min_priority=-5).priority == -3
    assert asked({}, min_priority=5).priority == 5  # the default priority rises to the key's bound
    app = make_app(FakeRouter(), min_priority=-5)
    reply = post(app, "/v1/completions", {"prompt": "yo", "priority": -6})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "priority"


def test_without_keys_the_user_field_names_the_tenant():
    assert asked({"user": "somebody"}).tenant == "somebody"


def test_with_keys_the_key_names_the_tenant(tmp_path):
    keys = ("secret-one", "secret-two")
    file = key_file(tmp_path / "keys.json", *keys)
    tenants = [
        asked({"user": name}, keys=file, authorization=f"Bearer {key}").tenant
        for key in keys
        for name in ("me", "somebody else")
    ]
    assert tenants[0] == tenants[1] != tenants[2] == tenants[3]
    assert not any("secret" in tenant for tenant in tenants)


def test_the_router_may_refuse_a_request_for_its_deadline():
    reply = complete(FakeRouter([Update(outcome=Rejected("late", 2.5))]), {"slo_ttft_ms": 1})
    assert reply.status == 429
    assert reply.headers["retry-after"] == "3"


# ---------------------------------------------------------------- decision header


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, complete])
def test_the_decision_header_is_sent_on_request(ask, stream):
    reply = ask(FakeRouter(SCRIPT), {"stream": stream}, x_baton_decision="1")
    assert "\n" not in reply.headers[HEADER]
    assert msgspec.json.decode(reply.headers[HEADER], type=Decision) == DECISION
    for headers in ({}, {"x_baton_decision": "0"}, {"x_baton_timeline": "1"}):
        assert HEADER not in ask(FakeRouter(SCRIPT), {"stream": stream}, **headers).headers


def test_the_decision_header_is_that_of_the_first_choice():
    other = msgspec.structs.replace(DECISION, prefill_worker="p7")
    follows = [
        msgspec.structs.replace(
            update, timeline=update.timeline and msgspec.structs.replace(PLACED, decision=other)
        )
        for update in SCRIPT
    ]
    reply = chat(FakeRouter(SCRIPT, follows), {"n": 2}, x_baton_decision="1")
    assert msgspec.json.decode(reply.headers[HEADER])["prefill_worker"] == "p0"


@pytest.mark.parametrize("may_debug", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_only_debug_keys_see_the_decision_and_the_timeline(tmp_path, may_debug, stream):
    file = key_file(tmp_path / "keys.json", "secret", debug=may_debug)
    app = make_app(FakeRouter(SCRIPT), keys=file)
    headers = {"x_baton_decision": "1", "x_baton_timeline": "1", "authorization": "Bearer secret"}
    reply = post(app, "/v1/completions", {"prompt": "yo", "stream": stream}, **headers)
    assert reply.status == 200
    assert (HEADER in reply.headers) == may_debug
    assert (b"baton_timeline" in reply.body) == may_debug


def test_without_a_decision_there_is_no_decision_header():
    reply = chat(FakeRouter(answer("hi")), x_baton_decision="1")
    assert reply.status == 200
    assert HEADER not in reply.headers


def test_timeline_and_decision_can_both_be_asked_for():
    reply = chat(FakeRouter(SCRIPT), x_baton_decision="1", x_baton_timeline="1")
    assert HEADER in reply.headers
    assert reply.json()["baton_timeline"]["decision"]["policy"] == "slo"
