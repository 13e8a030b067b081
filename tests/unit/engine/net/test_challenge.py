"""Both ends of a session prove that they know the secret, and neither reveals it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Untrusted
from engine.net.challenge import (
    CHALLENGE_BYTES,
    CHALLENGE_TTL_S,
    CLAIM_BYTES,
    MAX_SPENT,
    Challenger,
    Claimant,
)
from engine.net.trust import Secret

SECRET = Secret("token")
ADDRESS = "127.0.0.1:5000"


def challenger(secret: Secret = SECRET, address: str = ADDRESS, process: bytes = b"process"):
    return Challenger(secret, address, process_key=process)


def claimant(secret: Secret = SECRET, address: str = ADDRESS, noise: bytes = bytes(16)):
    return Claimant(secret, address, noise=noise)


def test_two_ends_with_the_same_secret_trust_each_other():
    server, client = challenger(), claimant()
    claim = client.claim(server.challenge(0.0, bytes(16)))
    assert len(claim) == CLAIM_BYTES
    client.check(server.redeem(claim, 1.0))


def refusal(server: Challenger, claim: bytes, now_s: float = 0.0) -> str:
    with pytest.raises(Untrusted) as caught:
        server.redeem(claim, now_s)
    return str(caught.value)


def test_a_client_with_another_secret_is_refused():
    server = challenger()
    claim = claimant(Secret("guess")).claim(server.challenge(0.0, bytes(16)))
    assert refusal(server, claim) == "wrong secret or address"


def test_a_claim_is_good_once():
    server, client = challenger(), claimant()
    claim = client.claim(server.challenge(0.0, bytes(16)))
    server.redeem(claim, 0.0)
    assert refusal(server, claim) == "repeated claim"
    assert refusal(server, claim, CHALLENGE_TTL_S + 1) == "late claim"


def test_a_challenge_cannot_be_answered_late():
    server = challenger()
    claim = claimant().claim(server.challenge(0.0, bytes(16)))
    assert refusal(server, claim, CHALLENGE_TTL_S + 0.1) == "late claim"


def test_a_challenge_of_another_process_is_refused_even_with_the_secret():
    claim = claimant().claim(challenger(process=b"other").challenge(0.0, bytes(16)))
    assert refusal(challenger(), claim) == "challenge of another process"


def test_an_impostor_cannot_pass_a_clients_claim_on():
    """A client connects to the impostor, which forwards the challenge of a real server."""
    server = challenger()
    claim = claimant(address="127.0.0.1:6666").claim(server.challenge(0.0, bytes(16)))
    assert refusal(server, claim) == "wrong secret or address"


@pytest.mark.parametrize("proof", [b"", bytes(32), b"\xff" * 33], ids=["none", "zeros", "too long"])
def test_a_client_sends_nothing_to_an_unproven_server(proof):
    client = claimant()
    client.claim(bytes(CHALLENGE_BYTES))
    with pytest.raises(Untrusted):
        client.check(proof)


def test_a_client_does_not_take_its_own_proof_for_the_servers():
    client = claimant()
    claim = client.claim(bytes(CHALLENGE_BYTES))
    with pytest.raises(Untrusted):
        client.check(claim[-32:])


def test_answered_challenges_are_kept_only_until_they_expire():
    server = challenger()
    for number in range(MAX_SPENT):
        noise = number.to_bytes(16, "big")
        server.redeem(claimant(noise=noise).claim(server.challenge(0.0, noise)), 0.0)
    noise = MAX_SPENT.to_bytes(16, "big")
    another = claimant().claim(server.challenge(0.0, noise))
    assert refusal(server, another) == "too many sessions begin"
    later_s = 2 * CHALLENGE_TTL_S
    server.redeem(claimant().claim(server.challenge(later_s, noise)), later_s)
    assert len(server._spent) == 1


@given(st.binary(max_size=2 * CLAIM_BYTES))
def test_arbitrary_bytes_are_no_claim(claim):
    refusal(challenger(), claim)


@given(st.integers(0, 8 * CLAIM_BYTES - 1))
def test_a_claim_with_one_bit_changed_is_refused(bit):
    server = challenger()
    claim = bytearray(claimant().claim(server.challenge(0.0, bytes(16))))
    claim[bit // 8] ^= 1 << bit % 8
    refusal(server, bytes(claim))


@given(st.binary(max_size=2 * CHALLENGE_BYTES).filter(lambda b: len(b) != CHALLENGE_BYTES))
def test_a_challenge_of_wrong_length_is_refused(challenge):
    with pytest.raises(Untrusted):
        claimant().claim(challenge)
