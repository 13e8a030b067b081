"""Tenants of API keys, their limits, and their usage: requests, tokens and requests in flight.

Pure: no clock, no HTTP. The gateway checks the limits before it tokenises, and again when it knows
the length of the prompt.

Requests and tokens each have a bucket, which fills at the rate of the limit. The size of a bucket
is the burst that a key may use at once: one minute of tokens, or one second of requests but at
least one request. A request takes tokens for its prompt and its longest possible answer, and
returns the unused tokens when it ends. A request larger than the bucket takes a full bucket. Each
prompt of a batch counts as a request.

Gateway processes of one port share the accounts (`router.access.shared_accounts`). Gateways on
several machines count separately.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from router.inbox.api_errors import ApiError

MAX_ACCOUNTS = 10_000  # number of accounts above which those without requests in flight are removed
BUSY_RETRY_S = 1.0  # seconds after which a request in flight may have ended


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one key; None means no limit. Raises ValueError if a limit is not positive."""

    requests_per_s: float | None = None
    tokens_per_min: int | None = None  # tokens of prompts and answers together
    max_streams: int | None = None  # maximum number of requests in flight

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive")

    def or_else(self, defaults: "KeyLimits") -> "KeyLimits":
        """Returns these limits, with the default wherever a limit is None."""
        own = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(defaults, **{n: v for n, v in own.items() if v is not None})


UNLIMITED = KeyLimits()


class Tenant(msgspec.Struct, frozen=True):
    """The owner of a key. Tenants with equal `sharing` share cached prefixes."""

    name: str
    sharing: str
    limits: KeyLimits
    may_debug: bool
    queue: str = ""  # name in fair queues: the key's name, or the client's address

    def __post_init__(self) -> None:
        if not self.queue:
            msgspec.structs.force_setattr(self, "queue", self.name)

    @property
    def owner(self) -> str:
        """The name under which this tenant's data is stored, different for each key."""
        return f"{self.sharing}/{self.name}"


# The tenant of a gateway without keys.
ANONYMOUS = Tenant(name="", sharing="", limits=KeyLimits(), may_debug=True)


class LimitExceeded(ApiError):
    """A key has reached a limit. `headers` say when it may send more requests."""

    def __init__(self, message: str, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, code="rate_limit_exceeded", status=429)
        retry_after = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
        self.headers = {**headers, **retry_after}


@dataclass(slots=True)
class Bucket:
    """The unused units of a limit. The bucket is refilled with `rate` units per second."""

    size: float
    rate: float
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        """Refills the bucket for the time until `now_s`."""
        gained = max(now_s - self.at_s, 0.0) * self.rate
        self.level = min(self.level + gained, self.size)
        self.at_s = max(now_s, self.at_s)  # another process may have set a later time

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until `amount` units may be taken; 0.0 if they may be taken now."""
        return max(min(amount, self.size) - self.level, 0.0) / self.rate

    def headers(self, what: str) -> dict[str, str]:
        """Returns OpenAI's headers: limit, unused units, and the time until the bucket is full."""
        reset_s = (self.size - self.level) / self.rate
        return {
            f"x-ratelimit-limit-{what}": str(int(self.size)),
            f"x-ratelimit-remaining-{what}": str(max(int(self.level), 0)),
            f"x-ratelimit-reset-{what}": f"{reset_s:.3f}s",
        }


@dataclass(slots=True)
class Account:
    """The usage of one key. Read and change it only in the context of `held`."""

    limits: KeyLimits
    requests: Bucket | None
    tokens: Bucket | None
    num_streams: int = 0
    num_others: int = 0  # number of requests in flight in other processes
    held: Callable[[], AbstractContextManager[None]] = nullcontext

    def claim(self, num_more: int, now_s: float, num_counted: int = 0) -> None:
        """Counts `num_more` requests, after `num_counted` of this call. Raises LimitExceeded."""
        what = "prompts" if num_counted else "requests"
        most = self.limits.max_streams
        if most is not None and self.num_streams + self.num_others + num_more > most:
            more = "; each prompt counts as one" if num_counted else ""
            message = f"this key may have {most} requests in flight{more}"
            raise LimitExceeded(message, BUSY_RETRY_S, self.headers(now_s))
        if self.requests is not None:
            self.requests.fill(now_s)
            amount = min(num_more, self.requests.size - num_counted)
            wait_s = self.requests.wait_s(amount)
            if wait_s > 0.0:
                message = f"this key may send {self.limits.requests_per_s:g} {what} a second"
                raise LimitExceeded(message, wait_s, self.headers(now_s))
            self.requests.level -= amount
        self.num_streams += num_more

    def headers(self, now_s: float) -> dict[str, str]:
        """Returns the headers of all limits of the key."""
        headers: dict[str, str] = {}
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                bucket.fill(now_s)
                headers |= bucket.headers(what)
        return headers


@dataclass(slots=True)
class KeyUse:
    """The tokens and requests that one call of a key has taken."""

    account: Account | None  # None for a key without limits
    held_tokens: float = 0.0
    num_used: int = 0  # number of tokens of its prompt and answers
    _num_streams: int = field(default=1, init=False)
    _is_released: bool = field(default=False, init=False)

    def hold_prompts(self, num_prompts: int, now_s: float) -> None:
        """Counts each prompt of a batch as a request. Raises LimitExceeded."""
        if self.account is not None and num_prompts > 1:
            with self.account.held():
                # The first prompt has been counted as the request itself.
                self.account.claim(num_prompts - 1, now_s, num_counted=1)
            self._num_streams = num_prompts

    def hold_tokens(self, num_tokens: int, now_s: float) -> None:
        """Takes the tokens that the request may need at most. Raises LimitExceeded."""
        account = self.account
        if account is None or account.tokens is None:
            return
        with account.held():
            bucket = account.tokens
            bucket.fill(now_s)
            wait_s = bucket.wait_s(num_tokens)
            if wait_s > 0.0:
                message = f"this key may use {account.limits.tokens_per_min} tokens a minute"
                raise LimitExceeded(message, wait_s, account.headers(now_s))
            self.held_tokens = min(num_tokens, bucket.size)
            bucket.level -= self.held_tokens

    def release(self, now_s: float) -> None:
        """Returns the unused tokens to the bucket, and ends the request."""
        account = self.account
        if account is None:
            return
        assert not self._is_released
        self._is_released = True
        with account.held():
            account.num_streams -= self._num_streams
            if account.tokens is not None:
                account.tokens.fill(now_s)
                left = max(self.held_tokens - self.num_used, 0.0)
                account.tokens.level = min(account.tokens.level + left, account.tokens.size)

    def headers(self, now_s: float) -> dict[str, str]:
        """Returns the headers of the key's limits, if it has any."""
        if self.account is None:
            return {}
        with self.account.held():
            return self.account.headers(now_s)


class Sharing(Protocol):
    """The interface for sharing accounts with other processes."""

    def held(self, key: str, account: Account) -> AbstractContextManager[None]:
        """Updates the account on entry to the context, and shares its changes on exit."""
        ...


class KeyAccounts:
    """The accounts of all keys."""

    def __init__(
        self,
        defaults: KeyLimits,
        *,
        max_accounts: int = MAX_ACCOUNTS,
        shared: Sharing | None = None,
    ) -> None:
        """Without `shared`, this process counts its own requests only."""
        self.has_defaults = defaults != UNLIMITED  # False: only own limits of keys apply
        self._defaults = defaults
        self._shared = shared
        self._max_accounts = max_accounts
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def start(self, name: str, limits: KeyLimits, now_s: float) -> KeyUse:
        """Starts a request of a key. Raises LimitExceeded."""
        limits = limits.or_else(self._defaults)
        if limits == UNLIMITED:
            return KeyUse(None)
        account = self._account(name, limits, now_s)
        with account.held():
            account.claim(1, now_s)
        return KeyUse(account)

    def _account(self, name: str, limits: KeyLimits, now_s: float) -> Account:
        account = self._accounts.get(name)
        if account is None or account.limits != limits:
            fresh = _new_account(limits, now_s)
            if account is None:
                self._remove_one()
                self._accounts[name] = account = fresh
                if self._shared is not None:
                    account.held = partial(self._shared.held, name, account)
            else:  # the key's limits have changed, and its requests in flight stay counted
                account.limits, account.requests, account.tokens = (
                    limits,
                    fresh.requests,
                    fresh.tokens,
                )
        self._accounts.move_to_end(name)
        return account

    def _remove_one(self) -> None:
        if len(self._accounts) < self._max_accounts:
            return
        idle = (name for name, account in self._accounts.items() if not account.num_streams)
        if (oldest := next(idle, None)) is not None:
            del self._accounts[oldest]

    def validate(self) -> None:
        """Asserts that all levels and counts are within bounds."""
        for account in self._accounts.values():
            assert account.num_streams >= 0
            for bucket in (account.requests, account.tokens):
                assert bucket is None or -1e-6 <= bucket.level <= bucket.size + 1e-6


def _new_account(limits: KeyLimits, now_s: float) -> Account:
    requests = tokens = None
    if limits.requests_per_s is not None:
        size = max(limits.requests_per_s, 1.0)
        requests = Bucket(size, limits.requests_per_s, size, now_s)
    if limits.tokens_per_min is not None:
        per_min = float(limits.tokens_per_min)
        tokens = Bucket(per_min, per_min / 60.0, per_min, now_s)
    return Account(limits, requests, tokens)
