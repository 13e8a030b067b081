"""The deployment's secret, and every key that is derived from it.

One random token is made when a deployment starts, and each process of the deployment receives it.
The token itself is never sent over a connection. Each purpose has a key of its own, so a leaked key
reveals nothing about other keys:

    root = blake2b(token, person "baton secret")        key(purpose) = blake2b(purpose, key root)

Pure: no socket, no clock. Sources: RFC 7693, keyed BLAKE2 as a pseudo-random function.
"""

from hashlib import blake2b

from engine.errors import ConfigError

KEY_BYTES = 32
SALT_BYTES = 32


class Secret:
    """The secret that all processes of one deployment share."""

    def __init__(self, token: str) -> None:
        """Raises ConfigError if `token` is empty."""
        if not token:
            raise ConfigError("the deployment's secret is empty")
        encoded = token.encode(errors="surrogatepass")
        self._root = blake2b(encoded, person=b"baton secret").digest()
        self._keys: dict[str, bytes] = {}  # derived keys by purpose; there are few purposes
        self._salts: dict[str, bytes] = {}  # salts by group, for requests without `cache_salt`

    def __repr__(self) -> str:
        return "Secret(…)"

    def key(self, purpose: str) -> bytes:
        """Returns the key of one purpose, KEY_BYTES long."""
        key = self._keys.get(purpose)
        if key is None:
            derived = blake2b(purpose.encode(), key=self._root, digest_size=KEY_BYTES)
            key = self._keys[purpose] = derived.digest()
        return key

    def salt(self, group: str, cache_salt: str = "") -> bytes:
        """Returns the key under which a tenant's blocks are hashed, SALT_BYTES long.

        Requests share cached prefixes if both `group`, which the operator chooses, and
        `cache_salt`, which the client may choose, are equal.
        """
        if cache_salt:
            return self.digest("salts of tenants", group, cache_salt, size=SALT_BYTES)
        salt = self._salts.get(group)
        if salt is None:
            salt = self._salts[group] = self.digest("salts of tenants", group, "", size=SALT_BYTES)
        return salt

    def digest(self, purpose: str, *texts: str, size: int) -> bytes:
        """Returns a digest of these texts, `size` bytes long. Only processes that have the secret
        can compute it.
        """
        digest = blake2b(key=self.key(purpose), digest_size=size)
        for text in texts:  # lengths are hashed too, to separate the texts
            encoded = text.encode(errors="surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        return digest.digest()
