"""Session hints: from two request headers to a message for the stores after the answer."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.messages import MAX_HASHES, SessionUse, decode_to_worker, encode_frame
from engine.net.trust import Secret
from engine.worker.blocks import hash_blocks
from router.access.limits import ANONYMOUS, KeyLimits, Tenant
from router.gateway.hints import uses
from router.gateway.hints.claims import (
    MAX_SESSION_LEN,
    SessionClaim,
    claim_of,
    key_id,
    session_id,
)
from router.machine.requests import Cancelled, Failed, Rejected, Update
from tests.kits.router.access import key_file
from tests.kits.router.gateway import (
    EOS,
    SECRET,
    STOP,
    Connection,
    FakeRouter,
    Never,
    answer,
    chat,
    complete,
    make_app,
    post,
    tokens,
)

BLOCK_SIZE = 4
PROMPT = "a prompt of some blocks"


def a_router(*script, block_size=BLOCK_SIZE):
    """Returns a router with a store."""
    router = FakeRouter(*script)
    router.store_block = block_size
    return router


def ask(router, fields=None, **headers):
    return complete(
        router, {"prompt": PROMPT, **(fields or {})}, **{"x_baton_session": "s", **headers}
    )


def hashes(text, num_tokens, salt=None):
    """Returns the hashes of the full blocks among the first tokens of a text."""
    return hash_blocks(
        [*text.encode()][:num_tokens], BLOCK_SIZE, SECRET.salt("", "") if salt is None else salt
    )


def expected(text, num_tokens, **fields):
    return SessionUse(
        key_id(ANONYMOUS, SECRET),
        session_id("s", ANONYMOUS, SECRET),
        hashes(text, num_tokens),
        **fields,
    )


# ---------------------------------------------------------------- messages to stores


@pytest.mark.parametrize("stream", [False, True])
def test_stores_get_the_blocks_of_prompt_and_answer_without_the_last_token(stream):
    router = a_router(answer(" and more"))
    assert ask(router, {"stream": stream}, x_baton_keep_s="60").status == 200
    whole = PROMPT + " and more"  # the end token after the text has no KV
    assert router.told == [expected(whole, len(whole), keep_s=60.0)]
    assert len(router.told[0].hashes) == len(whole) // BLOCK_SIZE


def test_a_last_token_that_would_fill_a_block_does_not():
    text = "x" * (BLOCK_SIZE - 1)
    router = a_router([tokens(text), Update((EOS,), outcome=STOP)])
    ask(router, {"prompt": PROMPT[:BLOCK_SIZE]})
    assert router.told == [expected(PROMPT[:BLOCK_SIZE], BLOCK_SIZE)]


def test_without_a_store_or_a_session_no_block_is_hashed(monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("hashed")

    monkeypatch.setattr(uses, "hash_blocks", never)
    monkeypatch.setattr("router.machine.requests.hash_blocks", never)
    alone = FakeRouter()
    assert ask(alone).status == 200
    assert alone.told == []
    router = a_router()
    assert complete(router, {"prompt": PROMPT}).status == 200
    assert router.told == []


def test_hashes_are_those_of_the_tenants_salt():
    router = a_router()
    ask(router, {"cache_salt": "mine"})
    salt = SECRET.salt("", "mine")
    assert router.told[0].hashes[0] == hashes(PROMPT, BLOCK_SIZE, salt)[0]
    assert router.told[0].hashes[0] != hashes(PROMPT, BLOCK_SIZE)[0]


@pytest.mark.parametrize("end", [Failed("lost"), Cancelled()], ids=repr)
def test_an_answer_that_failed_after_its_first_token_is_reported_too(end):
    router = a_router([tokens("ab"), Update(outcome=end)])
    ask(router)
    assert router.told == [expected(PROMPT + "a", len(PROMPT) + 1)]


@pytest.mark.parametrize(
    "last", [Update(outcome=Failed("lost")), Update(outcome=Rejected("full", 1.0))], ids=repr
)
def test_an_answer_without_a_token_is_not_told(last):
    router = a_router([last])
    assert ask(router).status in (429, 503)
    assert router.told == []


def test_a_client_that_leaves_in_the_middle_is_reported():
    router = a_router([tokens("ab"), Never()])

    async def run():
        headers = {"content-type": "application/json", "x-baton-session": "s"}
        connection = Connection(make_app(router), "POST", "/v1/completions", headers)
        connection.put_body(b'{"prompt": "%s", "stream": true}' % PROMPT.encode())
        task = asyncio.create_task(connection.run())
        await router.waiting.wait()
        connection.leave()
        await task

    asyncio.run(run())
    assert router.told == [expected(PROMPT + "a", len(PROMPT) + 1)]


def test_a_stop_string_ends_the_answer_as_any_other_end():
    router = a_router(answer("abXcd"))
    assert ask(router, {"stop": "X"}).json()["choices"][0]["text"] == "ab"
    assert len(router.told) == 1
    assert router.told[0].hashes[: len(PROMPT) // BLOCK_SIZE] == hashes(PROMPT, len(PROMPT))


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 1, "best_of": 3}])
def test_the_first_of_several_choices_is_reported(fields):
    router = a_router(answer("first"), answer("second"), answer("third"))
    ask(router, fields | {"seed": 1})
    leader = next(request for request in router.requests if request.leader is None)
    assert leader is router.requests[0]
    assert router.told == [expected(PROMPT + "first", len(PROMPT) + 5)]


def test_each_prompt_of_a_batch_is_reported():
    router = a_router()
    prompts = ["the first one", "another prompt"]
    ask(router, {"prompt": prompts})
    begins = [use.hashes[:3] for use in router.told]
    assert begins == [hashes(prompt, 12) for prompt in prompts]
    assert len({use.session for use in router.told}) == 1


def test_a_conversation_of_less_than_a_block_is_not_told():
    router = a_router(block_size=4096)
    ask(router)
    assert router.told == []


def test_the_answer_to_a_single_prompt_is_known_by_its_prompt():
    router = a_router([tokens("a", outcome=STOP)])
    ask(router, {"max_tokens": 0, "echo": True})
    assert router.told == [expected(PROMPT, len(PROMPT))]


def test_no_message_has_more_hashes_than_its_schema_allows(monkeypatch):
    monkeypatch.setattr(uses, "MAX_HASHES", 3)
    router = a_router(answer("and more"))
    ask(router)
    assert router.told == [expected(PROMPT, 3 * BLOCK_SIZE)]
    assert MAX_HASHES > 3


def test_a_message_of_a_use_survives_the_wire():
    router = a_router()
    ask(router, x_baton_keep_s="0.5")
    assert decode_to_worker(encode_frame(router.told)) == router.told


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/responses", {"input": PROMPT}),
        ("/invocations", {"prompt": PROMPT}),
    ],
)
def test_every_endpoint_that_answers_takes_a_session(path, fields):
    router = a_router()
    app = make_app(router, context_len=4096)
    assert post(app, path, fields, x_baton_session="s").status == 200
    (use,) = router.told
    prompt = router.requests[0].token_ids
    assert use.hashes[: len(prompt) // BLOCK_SIZE] == hash_blocks(
        prompt, BLOCK_SIZE, router.requests[0].salt
    )


# ---------------------------------------------------------------- what hints reveal to stores


def test_ids_tell_neither_names_nor_keys_and_differ_between_keys(tmp_path):
    keys = key_file(tmp_path / "keys.json", "sesame", "lentil", group="team")
    router = a_router()
    app = make_app(router, keys=keys)
    for key in ("sesame", "lentil", "sesame"):
        body = {"prompt": PROMPT}
        reply = post(
            app, "/v1/completions", body, authorization=f"Bearer {key}", x_baton_session="chat"
        )
        assert reply.status == 200
    one, other, again = router.told
    assert one == again
    assert one.hashes == other.hashes  # keys of a group share blocks, but not session ids
    assert one.key != other.key
    assert one.session != other.session
    for use in router.told:
        sent = encode_frame([use])
        assert not any(text in sent for text in (b"sesame", b"lentil", b"team", b"chat", b"one"))


names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=6)
tenants = st.builds(
    Tenant,
    name=names,
    sharing=names.map("key:{}".format),
    limits=st.just(KeyLimits()),
    may_debug=st.just(False),
)


@given(tenants, names, tenants, names)
def test_only_the_same_key_and_name_give_the_same_session(one, name, other, other_name):
    same = (one.owner, name) == (other.owner, other_name)
    assert (session_id(name, one, SECRET) == session_id(other_name, other, SECRET)) is same
    assert (key_id(one, SECRET) == key_id(other, SECRET)) is (one.owner == other.owner)
    assert key_id(one, SECRET) != session_id(name, one, SECRET)


def test_ids_follow_from_the_secret_of_the_deployment():
    another = Secret("another")
    assert key_id(ANONYMOUS, another) != key_id(ANONYMOUS, SECRET)
    assert session_id("s", ANONYMOUS, another) != session_id("s", ANONYMOUS, SECRET)


# ---------------------------------------------------------------- wrong headers

WRONG = ["", " ", "a b", "x" * (MAX_SESSION_LEN + 1), "tab\there", "é", "line\n", "\x7f", "\x00"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("ask_for", [chat, complete])
def test_a_session_that_cannot_be_is_refused(ask_for, wrong):
    router = a_router()
    reply = ask_for(router, x_baton_session=wrong)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (
        400,
        "invalid_value",
        "x-baton-session",
    )
    assert (router.requests, router.told) == ([], [])


@pytest.mark.parametrize(
    "wrong", ["", "soon", "0", "0.0005", "-1", "nan", "inf", "-inf", "86401", "1e99", "9" * 5000]
)
def test_a_time_to_keep_that_cannot_be_is_refused(wrong):
    reply = ask(a_router(), x_baton_keep_s=wrong)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "x-baton-keep-s")
    assert len(reply.json()["error"]["message"]) < 200


def test_a_time_to_keep_needs_a_session():
    reply = complete(a_router(), x_baton_keep_s="60")
    assert (reply.status, reply.json()["error"]["param"]) == (400, "x-baton-keep-s")


def test_the_longest_session_and_time_pass():
    router = a_router()
    name = "~" * MAX_SESSION_LEN
    assert ask(router, x_baton_session=name, x_baton_keep_s="86400").status == 200
    assert router.told[0].keep_s == 86_400.0


@given(st.text(max_size=200), st.none() | st.text(max_size=20))
def test_any_header_is_a_claim_within_bounds_or_refused(text, keep):
    headers = {"x-baton-session": text} | ({} if keep is None else {"x-baton-keep-s": keep})
    try:
        claim = claim_of(headers, ANONYMOUS, SECRET)
    except InvalidRequest:
        return
    assert isinstance(claim, SessionClaim)
    message = SessionUse(claim.key, claim.session, [], claim.keep_s)
    assert decode_to_worker(encode_frame([message])) == [message]
