"""Tenants' salts: from the body to every hash, and what subscribers to block events can learn."""

import msgspec
import pytest

from engine.errors import ProtocolError
from engine.messages import (
    Decode,
    GatewayId,
    Generate,
    LeaseRef,
    Limits,
    OfferPrefix,
    Prefill,
    RequestId,
    Sampling,
    TransferAddress,
    decode_to_worker,
    encode_frame,
)
from engine.net.trust import SALT_BYTES, Secret
from engine.worker.block_events import EventLog, decode_batch
from engine.worker.blocks import BlockPool, hash_block, hash_blocks
from engine.worker.intake import Intake
from router.machine.flight import Flight, Stamps
from router.machine.requests import Request
from tests.kits.router.access import key_file
from tests.kits.router.gateway import SECRET, FakeRouter, chat, complete, make_app, post
from tests.kits.tree.compat import like

BLOCK_SIZE = 16
LEASE = LeaseRef("l", TransferAddress("w", "life", "tcp://x"), 1)
LIMITS = Limits(100)


# ---------------------------------------------------------------- salts in requests


def salts(*bodies, keys=None, key=None):
    """Returns the salts of the requests that these bodies produced."""
    router = FakeRouter()
    app = make_app(router, keys=keys)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for body in bodies:
        reply = post(app, "/v1/completions", {"prompt": "yo", **body}, **headers)
        assert reply.status == 200, reply.body
    return [request.salt for request in router.requests]


def test_a_salt_is_never_empty_and_the_deployments_own():
    (salt,) = salts({})
    assert salt == SECRET.salt("", "")
    assert salt != Secret("another").salt("", "")
    assert len(salt) == SALT_BYTES


def test_cache_salt_keeps_requests_of_one_client_apart():
    plain, one, same, other = salts({}, *({"cache_salt": text} for text in ("a", "a", "b")))
    assert one == same
    assert len({plain, one, other}) == 3


def test_user_changes_no_salt():
    assert len(set(salts({}, {"user": "me"}))) == 1


@pytest.mark.parametrize("ask", [chat, complete])
def test_all_choices_of_an_answer_have_one_salt(ask):
    router = FakeRouter()
    assert ask(router, {"n": 3, "cache_salt": "a"}).status == 200
    assert {request.salt for request in router.requests} == {SECRET.salt("", "a")}


@like(
    "vllm",
    "entrypoints/openai/chat_completion/test_non_object_body_validation.py",
    "test_chat_completion_request_cache_salt_still_validated_on_dict",
)
@pytest.mark.parametrize("cache_salt", ["", "x" * 257, 3, ["a"]])
def test_a_cache_salt_that_cannot_be_is_refused(cache_salt):
    reply = complete(FakeRouter(), {"cache_salt": cache_salt})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "cache_salt"


def test_each_key_has_a_salt_of_its_own_and_a_group_shares_one(tmp_path):
    apart = key_file(tmp_path / "apart.json", "a", "b")
    assert len({salts({}, keys=apart, key=key)[0] for key in "ab"} | set(salts({}))) == 3
    group = key_file(tmp_path / "group.json", "a", "b", group="team")
    assert len({salts({}, keys=group, key=key)[0] for key in "ab"}) == 1
    asked = {"cache_salt": "mine"}
    assert salts(asked, keys=group, key="a") == salts(asked, keys=group, key="b")
    assert salts(asked, keys=apart, key="a") != salts(asked, keys=apart, key="b")


# ---------------------------------------------------------------- salts in workers


def messages(salt):
    fields = ("r.0", [1] * 40, Sampling(), LIMITS)
    return [
        Prefill(*fields, salt=salt),
        Generate(*fields, salt=salt),
        Decode(*fields, LEASE, salt=salt),
        OfferPrefix("r.0", [1] * 40, salt),
    ]


def test_every_message_with_a_prompt_carries_a_salt_of_bounded_length():
    sent = messages(b"\xff" * SALT_BYTES)
    assert decode_to_worker(encode_frame(sent)) == sent
    for message in messages(b"s" * (SALT_BYTES + 1)):
        with pytest.raises(ProtocolError):
            decode_to_worker(encode_frame([message]))


def test_gateway_and_worker_hash_alike():
    salt = SECRET.salt("team", "")
    tokens = list(range(100))
    request = Request(RequestId("r"), tuple(tokens), Sampling(), Limits(200), 0.0, salt=salt)
    flight = Flight(request, Stamps(0.0), 0.0)
    expected = flight.hashes.leading(tokens, num_tokens=100, block_size=BLOCK_SIZE)
    assert expected != hash_blocks(tokens, BLOCK_SIZE)
    intake = Intake(BLOCK_SIZE)
    for message in messages(salt)[:3]:
        message = msgspec.structs.replace(message, token_ids=tokens, limits=Limits(200))
        seq = intake.open(GatewayId("g"), message)
        assert seq.block_hashes == expected
        assert seq.salt == salt  # the salt also covers blocks of the answer
    assert intake.read(OfferPrefix("r.0", tokens, salt), BLOCK_SIZE).block_hashes == expected


# ---------------------------------------------------------------- subscribers to block events


def prompt(code: int) -> list[int]:
    """Returns bytes as tokens. The text before the code is public."""
    return [*b"The entry code is ", *f"{code:05d}".encode(), *b" and stays so."][:32]


def heard(salt: bytes, code: int) -> list[bytes]:
    """Returns the hashes in the events of a worker that has cached this prompt."""
    pool = BlockPool(4, keeps_events=True, with_tokens=False)
    hashes = hash_blocks(prompt(code), BLOCK_SIZE, salt)
    pool.set_hashes(pool.allocate(len(hashes)), hashes, parent=None)
    log = EventLog(block_size=BLOCK_SIZE, with_token_ids=False)
    batches = [decode_batch(payload) for _, payload in log.append(pool.pop_events(), 0.0)]
    return [h for events in batches for event in events for h in event.block_hashes]


def test_a_code_of_five_digits_is_not_recovered_from_block_events():
    code = 73_205

    def recovered(hashes, tried):
        """Returns the codes found by an attacker, who knows the text before the code in the second
        block."""
        first, second = hashes
        return [c for c in tried if hash_block(first, prompt(c)[BLOCK_SIZE:]) == second]

    # without a salt the attack succeeds
    assert recovered(heard(b"", code), [code - 1, code]) == [code]
    assert recovered(heard(SECRET.salt("key:ann", ""), code), range(100_000)) == []


def test_the_same_prompt_of_two_tenants_has_nothing_in_common():
    ann, bob = (heard(SECRET.salt(f"key:{name}", ""), 12345) for name in ("ann", "bob"))
    assert set(ann).isdisjoint(bob)
