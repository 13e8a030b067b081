"""The operator's API, called in this process, and how a command finds the deployment."""

import asyncio
import io
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.core import Metric
from rich.console import Console
from starlette.requests import Request

from deploy.admin.api import MAX_CALLER_CHARS, admin_app, record_order
from deploy.admin.client import AdminError, find_deployment
from deploy.admin.schema import PlannerAnswer, PoolsAnswer, VersionsAnswer
from deploy.base.run_dir import AdminAccess, announce, announced, run_directory
from deploy.base.spec import BlockEventsAnswer
from deploy.commands.operator import COUNTS, check_role
from deploy.commands.options import parse_numbers
from deploy.commands.views import planner_view, pools_view, versions_table
from deploy.controller.controller import PoolController
from deploy.controller.metrics import controller_families
from deploy.controller.plan import ControllerPlan
from deploy.controller.sessions import PoolSessions
from deploy.controller.tasks import ControllerTasks
from deploy.pools.events import Connected, PoolTick, StartWorker, WorkerStarted
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Drain, OrderRefused, SetPlanner
from deploy.pools.planning import Planning
from deploy.pools.state import PoolLimits
from engine.config import Config, PlannerMode, UpdateConfig, WorkerConfig
from engine.control import SERVING_ROLES, GatewayReport, Intent, Pools, Version
from engine.demand import DecodeCost, Observation
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.log_context import AUDIT
from engine.messages import EventsAddress, Role, WorkerId
from engine.net.curve import Channel, client_keys, server_keys
from engine.net.trust import Secret
from router.planning.planner import PlannerRules

KEY = "secret"


class SetClock:
    def now_s(self) -> float:
        return 5.0


class FakeController:
    """A controller with a machine whose effects are ignored."""

    def __init__(self, pools: Pools) -> None:
        self.machine = PoolMachine(Intent((Version(pools=pools),)), limits=PoolLimits(4))
        self.planning = Planning(self.machine, PlannerRules(), order=self._handle)
        self.workers, self.gateways, self.stores, self.counters = {}, {}, {}, {}
        self.started = Config(update=UpdateConfig(hold_s=9.0))
        self.sessions = PoolSessions(
            Secret("token"),
            clock=SetClock(),
            tasks=ControllerTasks(lambda _: None),
            handle=self._handle,
        )
        for effect in self.machine.handle(PoolTick(), 0.0):
            if isinstance(effect, StartWorker):
                name = effect.worker_id
                self.machine.handle(WorkerStarted(name, effect.start, name), 1.0)
                self.machine.handle(Connected(name, name, effect.role, KVFormat.FP32), 2.0)

    order = PoolController.order
    device_of = PoolController.device_of

    @property
    def _plan(self) -> ControllerPlan:
        return ControllerPlan("", self.started, Pools(), token="", cores=1)

    @property
    def config(self) -> Config:
        return self._plan.under(self.machine.intent).config

    def metrics(self) -> list[Metric]:
        families = controller_families(
            self.machine,
            self.planning,
            counters={},
            health={},
            price_per_hour=1.5,
            stores=self.sessions.store_reports(),
        )
        return list(families)

    def _handle(self, event) -> None:
        self.machine.handle(event, 3.0)


def ask(method, path, body=None, key: str | None = KEY, controller=None) -> httpx.Response:
    app = admin_app(controller or FakeController(Pools(2, 1)), key=KEY, clock=SetClock())
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    content = (
        None if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    )

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/pools"),
        ("POST", "/v1/pools"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/requests"),
        ("GET", "/v1/logs"),
        ("GET", "/v1/stores"),
        ("POST", "/v1/stores/drop"),
        ("GET", "/v1/block-events"),
        ("GET", "/metrics"),
    ],
)
def test_every_page_needs_the_key(method, path, key):
    answer = ask(method, path, {"prefill": 1}, key=key)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json() == {
        "error": {"type": "unauthorized", "message": "this needs the admin key"}
    }


async def test_non_ascii_key_is_refused(capfd):
    app = admin_app(FakeController(Pools(2, 1)), key=KEY, clock=SetClock())
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("a body is not read before the key is known")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/pools",
        "raw_path": b"/v1/pools",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer \xff\xc3\x28\x00")],
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 401
    assert capfd.readouterr().err == ""


def test_the_controllers_metrics_are_in_prometheus_format():
    answer = ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert "baton_cost_per_hour 4.5" in lines
    assert 'baton_service_restarts_total{service="worker-2"} 0.0' in lines


def test_pools_are_answered_with_their_history():
    answer = msgspec.json.decode(ask("GET", "/v1/pools").content, type=PoolsAnswer)
    assert answer.wanted == Pools(2, 1)
    assert answer.settled
    assert [w.worker_id for w in answer.workers] == ["worker-0", "worker-1", "worker-2"]
    assert {w.state for w in answer.workers} == {"serving"}
    assert len(answer.steps) == 6
    later = ask("GET", f"/v1/pools?since={answer.steps[3].number}").json()["steps"]
    assert [step["number"] for step in later] == [5, 6]
    assert ask("GET", "/v1/pools?since=x").status_code == 400
    assert len(ask("GET", "/v1/workers").json()["workers"]) == 3


def test_order_is_answered_with_its_steps():
    answer = ask("POST", "/v1/pools", {"decode": 2})
    assert answer.status_code == 202
    found = answer.json()
    assert (found["wanted"], found["settled"]) == ({"prefill": 2, "decode": 2, "mixed": 0}, False)
    assert [step["what"] for step in found["steps"]] == [
        "are to be prefill=2 decode=2 mixed=0",
        "is being started",
    ]
    assert ask("POST", "/v1/workers/worker-0/flip", {"role": "decode"}).status_code == 202
    assert ask("POST", "/v1/workers/worker-0/drain").status_code == 202
    assert ask("POST", "/v1/workers/worker-0/stop").status_code == 202
    assert ask("POST", "/v1/planner", {"mode": "off"}).status_code == 202


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/pools", {"prefill": 9}, 409, "10 workers are more than the 4 there can be"),
        ("/v1/pools", {"prefill": 0}, 400, "need a prefill and a decode worker"),
        ("/v1/pools", {"prefill": -1}, 400, ">= 0"),
        ("/v1/pools", {"what": 1}, 400, "unknown field"),
        ("/v1/pools", b"{", 400, "truncated"),
        ("/v1/workers/worker-0/flip", b'{"role": "\xff"}', 400, "can't decode byte 0xff"),
        ("/v1/pools", b"x" * 70_000, 413, "too large"),
        ("/v1/workers/worker-2/flip", {"role": "prefill"}, 409, "last worker that decodes"),
        ("/v1/workers/worker-2/flip", {"role": "king"}, 400, "Invalid enum value 'king'"),
        ("/v1/workers/worker-2/drain", None, 409, "last worker that decodes"),
        ("/v1/workers/worker-2/stop", None, 409, "last worker that decodes"),
        ("/v1/workers/other/stop", None, 404, "no worker is called other"),
        ("/v1/planner", {"mode": "sometimes"}, 400, "Invalid enum value 'sometimes'"),
        ("/v1/other", None, 404, "Not Found"),
    ],
)
def test_impossible_request_is_refused_with_the_reason(path, body, status, reason):
    answer = ask("POST", path, body)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]


DECLARED = {
    "settings": {
        "pools": {"decode": 2, "max_workers": 5, "spares": 1},
        "update": {"hold_s": 3.0},
        "router": {"seed": 7},
    }
}


def test_what_is_declared_is_carried_out_and_the_rest_is_named():
    controller = FakeController(Pools(2, 1))
    before = ask("POST", "/v1/config/differences", DECLARED, controller=controller)
    assert before.status_code == 200
    found = {each["key"]: each["order"] for each in before.json()["differences"]}
    assert found == {
        "pools.decode": "baton pools set",
        "pools.max_workers": "baton apply",
        "pools.spares": "baton apply",
        "update.hold_s": "baton apply",
        "router.seed": "a restart",
    }
    answer = ask("POST", "/v1/config", DECLARED, controller=controller)
    assert answer.status_code == 202
    assert answer.json()["wanted"]["decode"] == 2
    assert answer.json()["max_workers"] == 5
    limits = controller.machine.limits
    assert (limits.pools.spares, limits.update.hold_s, controller.config.update.hold_s) == (1, 3, 3)
    after = ask("POST", "/v1/config/differences", DECLARED, controller=controller)
    assert [each["key"] for each in after.json()["differences"]] == ["router.seed"]


def test_a_declaration_is_carried_out_completely_or_not_at_all():
    controller = FakeController(Pools(2, 1))
    intent = controller.machine.intent
    body = {"settings": {"update": {"hold_s": 3.0}, "pools": {"decode": 30}}}
    answer = ask("POST", "/v1/config", body, controller=controller)
    assert answer.status_code == 409
    assert "more than the 4 there can be" in answer.json()["error"]["message"]
    assert ask("POST", "/v1/config?preview=1", DECLARED, controller=controller).status_code == 200
    assert controller.machine.intent == intent
    body = {"settings": {"pools": {"decode": "many"}}}
    assert ask("POST", "/v1/config", body, controller=controller).status_code == 400


def test_openapi_names_every_page_and_resolves_every_reference():
    described = ask("GET", "/openapi.json").json()
    app = admin_app(FakeController(Pools(1, 1)), key=KEY, clock=SetClock())
    paths = {route.path for route in app.routes}
    assert set(described["paths"]) == paths - {"/metrics", "/openapi.json"}
    text = msgspec.json.encode(described).decode()
    names = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert names <= set(described["components"]["schemas"])
    [worker, _] = described["components"]["schemas"]["UpdateBody"]["properties"]["worker"]["anyOf"]
    assert set(worker["properties"]) == set(WorkerConfig.__struct_fields__)
    assert not any("default" in setting for setting in worker["properties"].values())


def test_pools_of_different_formats_cannot_be_planned():
    controller = FakeController(Pools(1, 1))
    controller.order(SetPlanner(PlannerMode.DRY_RUN))
    apart = WorkerConfig(decode_kv_dtype=KVFormat.INT8)
    controller.machine.state.intent = Intent((Version(worker=apart),))
    with pytest.raises(OrderRefused, match="as fp32, decode workers as int8: none can be flipped"):
        controller.order(SetPlanner(PlannerMode.ON))
    controller.order(SetPlanner(PlannerMode.OFF))


def test_block_events_answer_has_only_their_keys_and_addresses():
    controller = FakeController(Pools(1, 1))
    events = EventsAddress("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    controller.sessions.links = {
        WorkerId("w"): SimpleNamespace(info=SimpleNamespace(events=events)),
        WorkerId("unheard"): SimpleNamespace(info=None),
    }
    answer = msgspec.json.decode(
        ask("GET", "/v1/block-events", controller=controller).content, type=BlockEventsAnswer
    )
    assert answer.workers == {"w": events}
    server, mine = (
        keys(Secret("token"), Channel.BLOCK_EVENTS) for keys in (server_keys, client_keys)
    )
    assert answer.curve_serverkey.encode() == server.public
    assert (answer.curve_publickey.encode(), answer.curve_secretkey.encode()) == mine


def test_planner_page_shows_reasons_and_decisions():
    controller = FakeController(Pools(1, 2))
    controller.order(SetPlanner(PlannerMode.ON))
    cost = DecodeCost(0.01, 1e-5, 0.0)
    seen = Observation(requests_per_s=9.0, prefill_s_per_s=9.0, queued_s=9.0, decode_cost=cost)
    report = GatewayReport(None, 1, 3, 0, 0, 0.0, {"": seen})
    assert controller.planning.tick([report], {}, 4.0 - PlannerRules().cool_down_s) == []
    assert controller.planning.tick([report], {}, 4.0) != []
    answer = msgspec.json.decode(
        ask("GET", "/v1/planner", controller=controller).content, type=PlannerAnswer
    )
    assert answer.planner.mode is PlannerMode.ON
    assert answer.wanted == Pools(2, 1)
    [decision] = answer.decisions
    assert (decision.before, decision.after) == (Pools(1, 2), Pools(2, 1))
    assert (decision.outcome, decision.age_s) == ("done", 1.0)
    assert decision.summary == "prefill 1 → 2, decode 2 → 1: done"
    assert decision.reasons == answer.planner.reasons
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(planner_view(answer))
    text = shown.export_text()
    assert "planner on; wanted now: 2 prefill, 1 decode" in text
    assert "1 s ago  on: prefill 1 → 2, decode 2 → 1: done" in text
    assert "9.0 requests/s" in text
    pools = msgspec.json.decode(ask("GET", "/v1/pools", controller=controller).content)
    assert pools["planner"]["reasons"] == list(decision.reasons)
    assert pools["steps"][-2]["why"] == "planned"


def test_names_are_not_cut_in_a_narrow_terminal():
    controller = FakeController(Pools(1, 2))
    content = ask("GET", "/v1/pools", controller=controller).content
    answer = msgspec.json.decode(content, type=PoolsAnswer)
    some = {"pid": 1234567, "state_s": 12345.6, "num_blocks": 9, "free_blocks": 9}
    workers = [msgspec.structs.replace(worker, **some) for worker in answer.workers]
    answer = msgspec.structs.replace(answer, workers=workers)
    shown = Console(width=80, record=True, file=io.StringIO())
    shown.print(pools_view(answer), versions_table(answer))
    text = shown.export_text()
    assert {"worker-0", "worker-1", "worker-2", "1234567", "v1"} <= set(text.split())
    assert "…" not in text


# ---------------------------------------------------------------- how a command finds a deployment

ACCESS = AdminAccess("http://127.0.0.1:1", "k", os.getpid(), "http://127.0.0.1:2")


def test_announcement_is_private_and_found(tmp_path):
    path = announce(tmp_path / "run", ACCESS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert announced(tmp_path / "run") == [ACCESS]
    environment = {"BATON_RUN_DIR": str(tmp_path / "run")}
    assert find_deployment(None, None, environment) == ("http://127.0.0.1:1", "k")
    assert find_deployment(None, "mine", environment) == ("http://127.0.0.1:1", "mine")
    assert find_deployment("http://other", "mine", {}) == ("http://other", "mine")


def test_announcement_of_an_ended_process_counts_for_nothing(tmp_path):
    announce(tmp_path, msgspec.structs.replace(ACCESS, pid=2**22 + 7))
    (tmp_path / "broken.json").write_text("{")
    assert announced(tmp_path) == []
    with pytest.raises(ConfigError, match="no deployment of yours is announced in"):
        find_deployment(None, None, {"BATON_RUN_DIR": str(tmp_path)})
    with pytest.raises(ConfigError, match="announced at http://there"):
        find_deployment("http://there", None, {"BATON_RUN_DIR": str(tmp_path)})


def test_several_deployments_need_a_choice(tmp_path):
    announce(tmp_path, ACCESS)
    announce(tmp_path, AdminAccess("http://127.0.0.1:9", "other", os.getppid()))
    environment = {"BATON_RUN_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"choose one with --deployment .*: http.*http"):
        find_deployment(None, None, environment)
    assert find_deployment("http://127.0.0.1:9", None, environment)[1] == "other"


@pytest.mark.parametrize("name", ["blue", "1", "2"])
def test_a_deployment_is_named_by_its_name_or_a_port(tmp_path, name):
    announce(tmp_path, msgspec.structs.replace(ACCESS, name="blue"))
    announce(tmp_path, AdminAccess("http://127.0.0.1:9", "other", os.getppid()))
    environment = {"BATON_RUN_DIR": str(tmp_path)}
    assert find_deployment(None, None, environment, name) == ("http://127.0.0.1:1", "k")
    with pytest.raises(ConfigError, match=r"announced .* as green \(running: .*blue at http"):
        find_deployment(None, None, environment, "green")


def test_after_an_ended_deployment_the_one_left_must_be_named(tmp_path):
    environment = {"BATON_RUN_DIR": str(tmp_path)}
    announce(tmp_path, msgspec.structs.replace(ACCESS, pid=2**22 + 7, url="http://127.0.0.1:3"))
    announce(tmp_path, ACCESS)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:3\) has ended: choose one"):
            find_deployment(None, None, environment)
    assert find_deployment(None, None, environment, "2")[1] == "k"
    assert find_deployment(None, None, environment)[1] == "k"


def test_a_deployment_replaces_the_ended_one_of_its_url(tmp_path):
    announce(tmp_path, msgspec.structs.replace(ACCESS, pid=2**22 + 7))
    announce(tmp_path, ACCESS)
    assert find_deployment(None, None, {"BATON_RUN_DIR": str(tmp_path)})[1] == "k"


def test_run_directory_writable_by_others_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="to which no other user can write"):
        announce(tmp_path / "run", ACCESS)
    with pytest.raises(ConfigError, match="to which no other user can write"):
        announced(tmp_path / "run")


def test_run_directory_follows_the_environment():
    assert str(run_directory({"BATON_RUN_DIR": "/a"})) == "/a"
    assert str(run_directory({"XDG_RUNTIME_DIR": "/run/user/7"})) == "/run/user/7/baton"
    assert run_directory({}).name == f"baton-{os.getuid()}"


def test_counts_are_parsed_by_role():
    given = parse_numbers(["prefill=3", "decode=5"], COUNTS, SERVING_ROLES)
    assert given == {"prefill": 3, "decode": 5}
    for wrong in (["prefill"], ["prefill=x"], ["drained=1"], ["prefill=1", "prefill=2"]):
        with pytest.raises(ConfigError, match="is not ROLE=NUMBER"):
            parse_numbers(wrong, COUNTS, SERVING_ROLES)


def test_unexpected_result_of_an_order_is_reported():
    answer = msgspec.json.decode(ask("GET", "/v1/pools").content, type=PoolsAnswer)
    check_role(answer, "worker-0", Role.PREFILL)
    with pytest.raises(AdminError, match="worker-0 is prefill, not decode"):
        check_role(answer, "worker-0", Role.DECODE)
    with pytest.raises(AdminError, match="worker-9 is gone"):
        check_role(answer, "worker-9", Role.DRAINED)


def test_versions_can_be_ordered_and_listed():
    controller = FakeController(Pools(1, 1))
    model = str(Path(__file__).parent)
    answer = ask(
        "POST",
        "/v1/versions",
        {"model": model, "worker": {"kv_dtype": "int8"}, "weight": 3},
        controller=controller,
    )
    assert answer.status_code == 202, answer.text
    told = msgspec.json.decode(
        ask("GET", "/v1/versions", controller=controller).content, type=VersionsAnswer
    )
    first, second = told.versions
    assert (first.name, first.is_current, first.serving) == ("v1", True, Pools(1, 1))
    assert (second.name, second.model, second.weight) == ("v2", model, 3)
    assert (second.wanted, second.serving) == (Pools(1, 1), Pools(0, 0))
    assert told.taking_over is None
    weights = {"weights": {"v1": 90, "v2": 10}}
    assert ask("POST", "/v1/weights", weights, controller=controller).status_code == 202
    pools = ask("POST", "/v1/versions/v2/finish", {}, controller=controller)
    assert pools.json()["taking_over"] == "v2"
    refused = ask("POST", "/v1/versions/v1/abort", controller=controller)
    assert refused.status_code == 409
    assert ask("POST", "/v1/versions/v2/abort", controller=controller).status_code == 202


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"model": "/nowhere"}, "/nowhere: no such model directory"),
        ({"worker": {"kv_mib": 0}}, "worker: Expected `int` >= 1 - at `$.kv_mib`"),
        ({"worker": {"kv_mb": 1}}, "unknown field `kv_mb`"),
        ({"worker": {"kv_dtype": "int4", "decode_kv_dtype": "fp8_e4m3"}}, "cannot be combined"),
        ({"weight": -1}, "Expected `int` >= 0"),
        ({"pools": {"prefill": 3}}, "need a prefill and a decode worker"),
    ],
)
def test_version_that_cannot_serve_is_refused_before_any_start(body, reason):
    answer = ask("POST", "/v1/versions", body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_a_preview_shows_the_changes_of_an_order_and_changes_nothing():
    controller = FakeController(Pools(1, 1))
    before = controller.machine.intent
    answer = ask("POST", "/v1/pools?preview=1", {"decode": 2}, controller=controller)
    told = answer.json()
    assert answer.status_code == 200
    assert [told[when][0]["wanted"]["decode"] for when in ("before", "after")] == [1, 2]
    assert told["effects"] == ["start worker-2 as decode of v1"]
    assert any("are to be" in step["what"] for step in told["steps"])
    assert controller.machine.intent == before


def test_a_preview_is_refused_like_its_order():
    for query in ("", "?preview=1"):
        answer = ask("POST", f"/v1/workers/worker-2/drain{query}")
        assert answer.status_code == 409
    assert ask("POST", "/v1/pools?preview=2", {"decode": 2}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "key", "told"),
    [
        ("/v1/pools", {"prefill": 1}, KEY, ["SetPools", "status=202"]),
        ("/v1/pools?preview=1", {"prefill": 1}, KEY, []),
        ("/v1/pools", {"prefill": -1}, KEY, ["POST /v1/pools", "status=400"]),
        ("/v1/workers/none/drain", {}, KEY, ["Drain(worker_id='none')", "refused"]),
        ("/v1/pools", {"prefill": 1}, "wrong", []),
    ],
)
def test_orders_are_logged_with_their_result(caplog, path, body, key, told):
    with caplog.at_level("INFO", logger="baton.audit"):
        ask("POST", path, body, key=key)
    lines = [each.getMessage() for each in caplog.records if each.name == "baton.audit"]
    assert len(lines) == bool(told)
    assert all(word in lines[0] for word in told)


def test_a_wrong_key_is_a_warning(caplog):
    ask("POST", "/v1/pools", {"prefill": 1}, key="wrong")
    assert "its admin key is missing or wrong" in caplog.text


@pytest.fixture
def lines():
    """Collects the fields of the logged lines."""
    found = []

    class Keeper(logging.Handler):
        def emit(self, record):
            found.append(record.fields | {"text": record.getMessage()})

    keeper, level = Keeper(), AUDIT.level
    AUDIT.addHandler(keeper)
    AUDIT.setLevel(logging.INFO)
    yield found
    AUDIT.removeHandler(keeper)
    AUDIT.setLevel(level)


def request(**headers):
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/workers/worker-1/drain",
            "query_string": b"",
            "server": ("test", 80),
            "scheme": "http",
            "client": ("10.0.0.7", 5),
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        }
    )


def test_an_order_that_is_carried_out(lines):
    record_order(request(), Drain("worker-1"), 202)
    [line] = lines
    assert line["what"] == "Drain(worker_id='worker-1')"
    assert (line["who"], line["from"], line["status"]) == ("admin", "10.0.0.7", 202)
    assert "refusal" not in line
    assert line["text"].startswith("order: who=admin from=10.0.0.7 what=Drain(")


def test_a_body_that_is_not_understood(lines):
    record_order(request(), None, 400, "it is no JSON")
    [line] = lines
    assert line["what"] == "POST /v1/workers/worker-1/drain"
    assert line["refusal"] == "it is no JSON"


def test_a_gateway_names_its_client(lines):
    record_order(request(x_baton_caller="1.2.3.4 " + "x" * 500), None, 202)
    [line] = lines
    assert line["caller"].startswith("1.2.3.4 ")
    assert len(line["caller"]) == MAX_CALLER_CHARS
