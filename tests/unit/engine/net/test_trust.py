"""Keys derived from the deployment's secret."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.net.trust import KEY_BYTES, SALT_BYTES, Secret

pairs = st.tuples(st.text(max_size=8), st.text(max_size=8))


def test_each_purpose_has_a_key_of_its_own():
    secret = Secret("token")
    keys = {secret.key(purpose) for purpose in ("a", "b", "ab")}
    assert len(keys) == 3
    assert all(len(key) == KEY_BYTES for key in keys)


def test_the_same_token_gives_the_same_keys_in_every_process():
    assert Secret("token").key("a") == Secret("token").key("a")
    assert Secret("token").key("a") != Secret("other").key("a")


@pytest.mark.parametrize("token", ["sécret", "密", "\ud800"])
def test_a_token_may_hold_any_text(token):
    assert len(Secret(token).key("a")) == KEY_BYTES


def test_an_empty_token_is_refused():
    with pytest.raises(ConfigError):
        Secret("")


def test_a_secret_is_not_printed():
    assert "token" not in repr(Secret("token"))


@given(pairs, pairs)
def test_only_equal_groups_and_cache_salts_share_a_salt(one, other):
    secret = Secret("token")
    assert (secret.salt(*one) == secret.salt(*other)) == (one == other)
    assert len(secret.salt(*one)) == SALT_BYTES


def test_deployments_have_different_salts():
    assert Secret("token").salt("group") != Secret("other").salt("group")
