"""The environment set for Ray before its import, and variables removed from it."""

import os

from deploy.ray import own_ray
from engine.config import remove_environment


def test_own_ray_is_set_to_loopback_and_a_new_token():
    one: dict[str, str] = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "known to others"}
    another: dict[str, str] = {}
    own_ray.prepare(one)
    own_ray.prepare(another)
    assert one["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != another["RAY_AUTH_TOKEN"]


def test_ray_neither_takes_signals_nor_ends_this_process_after_the_death_of_its_raylet():
    set_for_ray: dict[str, str] = {}
    own_ray.prepare(set_for_ray)
    assert set_for_ray["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] == "1"
    assert set_for_ray["RAY_RAYLET_PID"] == str(os.getpid())
    assert int(set_for_ray["RAY_max_direct_call_object_size"]) > 2**24


def test_only_keys_are_removed_from_the_environment():
    environment = {
        "BATON_GATEWAY__PORT": "8000",
        "BATON_ADMIN__KEY": "secret",
        "BATON_CACHE": "/cache",
        "PATH": "/bin",
    }
    remove_environment(environment)
    assert environment == {"BATON_CACHE": "/cache", "PATH": "/bin"}
