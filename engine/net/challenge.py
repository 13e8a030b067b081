"""Proofs by which both ends of a session show that they have the deployment's secret.

    client                                            server
      <───────────────────────────────── challenge ──   now + 5 s, noise, and a MAC over both
      ── claim ──────────────────────────────────────>  challenge, client's noise, client's proof
      <───────────────────────────── server's proof ──  after the claim is checked

All three messages have fixed lengths and precede the first frame (`engine.net.sessions`). So the
server reads no frame of an untrusted client, and the client sends no frame to an untrusted server.
The server stores nothing for a challenge: the challenge's MAC, under a key of this process, shows
that the server issued it. A challenge is valid for one session. Proofs cover the address that the
client has dialled, so an impostor at another address cannot relay them.

Limits: sessions are neither encrypted nor signed frame by frame. An attacker on the path between
two machines can read sessions, and can take over a session after it has begun.

Pure: the clock and the noise are arguments.
"""

from collections import OrderedDict
from hashlib import blake2b
from hmac import compare_digest

from engine.errors import Untrusted
from engine.net.trust import KEY_BYTES, Secret

CHALLENGE_TTL_S = 5.0
NOISE_BYTES = 16
MAX_SPENT = 4096  # redeemed challenges that the server remembers until they expire
_TIME_BYTES = 8
_MAC_BYTES = 16
CHALLENGE_BYTES = _TIME_BYTES + NOISE_BYTES + _MAC_BYTES
CLAIM_BYTES = CHALLENGE_BYTES + NOISE_BYTES + KEY_BYTES


class Challenger:
    """The server's side: issues challenges and checks the clients' claims."""

    def __init__(self, secret: Secret, address: str, *, process_key: bytes) -> None:
        """`process_key` is random, and private to this process. Clients dial `address`."""
        self._secret = secret
        self._address = address
        self._process_key = process_key
        # Expiry time of each redeemed challenge, oldest first.
        self._spent: OrderedDict[bytes, float] = OrderedDict()

    def challenge(self, now_s: float, noise: bytes) -> bytes:
        """Returns a challenge that a client can answer within CHALLENGE_TTL_S."""
        due_ms = int(1000 * (now_s + CHALLENGE_TTL_S))
        said = due_ms.to_bytes(_TIME_BYTES, "big") + noise
        return said + self._mac(said)

    def redeem(self, claim: bytes, now_s: float) -> bytes:
        """Checks a claim and returns the server's proof. Raises Untrusted."""
        if len(claim) != CLAIM_BYTES:
            raise Untrusted("no claim" if not claim else "malformed claim")
        challenge, rest = claim[:CHALLENGE_BYTES], claim[CHALLENGE_BYTES:]
        noise, proof = rest[:NOISE_BYTES], rest[NOISE_BYTES:]
        said, mac = challenge[:-_MAC_BYTES], challenge[-_MAC_BYTES:]
        if not compare_digest(mac, self._mac(said)):
            raise Untrusted("challenge of another process")
        if now_s > int.from_bytes(said[:_TIME_BYTES], "big") / 1000:
            raise Untrusted("late claim")
        if not compare_digest(proof, _client_proof(self._secret, self._address, challenge, noise)):
            raise Untrusted("wrong secret or address")
        self._spend(challenge, now_s)
        return _server_proof(self._secret, self._address, challenge, noise)

    def _spend(self, challenge: bytes, now_s: float) -> None:
        while self._spent and next(iter(self._spent.values())) < now_s - CHALLENGE_TTL_S:
            self._spent.popitem(last=False)
        if challenge in self._spent:
            raise Untrusted("repeated claim")
        if len(self._spent) >= MAX_SPENT:
            raise Untrusted("too many sessions begin")
        self._spent[challenge] = now_s

    def _mac(self, said: bytes) -> bytes:
        return blake2b(said, key=self._process_key, digest_size=_MAC_BYTES).digest()


class Claimant:
    """The client's side of the proofs for one session."""

    def __init__(self, secret: Secret, address: str, *, noise: bytes) -> None:
        """`address` is the address that the client dials."""
        self._secret = secret
        self._address = address
        self._noise = noise
        self._challenge = b""

    def claim(self, challenge: bytes) -> bytes:
        """Returns the client's answer to a challenge. Raises Untrusted."""
        if len(challenge) != CHALLENGE_BYTES:
            raise Untrusted("malformed challenge")
        self._challenge = challenge
        proof = _client_proof(self._secret, self._address, challenge, self._noise)
        return challenge + self._noise + proof

    def check(self, proof: bytes) -> None:
        """Checks the server's proof. Raises Untrusted if the server does not have the secret."""
        expected = _server_proof(self._secret, self._address, self._challenge, self._noise)
        if not compare_digest(proof, expected):
            raise Untrusted("the server does not hold the secret")


def _client_proof(secret: Secret, address: str, challenge: bytes, noise: bytes) -> bytes:
    return _proof(secret.key("proof of a session's client"), address, challenge, noise)


def _server_proof(secret: Secret, address: str, challenge: bytes, noise: bytes) -> bytes:
    return _proof(secret.key("proof of a session's server"), address, challenge, noise)


def _proof(key: bytes, address: str, challenge: bytes, noise: bytes) -> bytes:
    """Returns a keyed hash. Challenge and noise have fixed lengths, so different arguments never
    give the same hashed bytes.
    """
    said = challenge + noise + address.encode()
    return blake2b(said, key=key, digest_size=KEY_BYTES).digest()
