"""`baton store`: its tables, the order to drop blocks, and warming."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from deploy.admin.client import AdminError
from deploy.admin.schema import DropBody, StoreInfo, StoreTier
from deploy.commands import options, store
from deploy.commands.main import app
from deploy.commands.store import size_text
from deploy.pools.stores import StoreState
from engine.control import PrefixUse

STORE = StoreInfo(
    name="store-v1",
    version="v1",
    node="",
    state=StoreState.SERVING,
    is_connected=True,
    pid=9,
    address="127.0.0.1:1",
    block_size=16,
    block_bytes=2**20,
    tiers=[
        StoreTier("host", 3, 4, 3 * 2**20, 4 * 2**20, 6, None),
        StoreTier("disk", 8, 4096, 8 * 2**20, 2**32, 2, "EIO"),
    ],
    num_peers=2,
    num_leases=1,
    num_new=5,
    num_starts=3,
    counters={"taken_blocks": 9.0, "dropped_blocks:orphan": 2.0, "failed_writes:disk_EIO": 4.0},
    prefixes=[PrefixUse("ab12" * 8, 40)],
)
SILENT = StoreInfo(
    *("store-v2", "v2", "n2", StoreState.WAITING, False, None, None, 16, 0, []),
    *(0, 0, 0, 0, {}, [], "no memory"),
)


class FakeAdmin:
    """A deployment with stores that records the received orders."""

    def __init__(self, stores=(STORE,)):
        self._stores = list(stores)
        self.dropped: list[DropBody] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stores(self):
        return self._stores

    def drop_stores(self, body, *, preview=False):
        if not self._stores:
            raise AdminError("there is no store", status=404)
        if not preview:
            self.dropped.append(body)
        return [store.name for store in self._stores]


@pytest.fixture
def admin(monkeypatch):
    fake = FakeAdmin()
    monkeypatch.setattr(options, "connect", lambda *_: fake)
    return fake


def invoke(*words, **more):
    return CliRunner().invoke(app, ["store", *words], env={"COLUMNS": "200"}, **more)


def test_stores_are_shown_with_tiers_faults_and_prefixes(admin):
    admin._stores = [STORE, SILENT]
    shown = invoke().output
    rows = [line.split() for line in shown.splitlines()]
    assert rows[3][:8] == ["store-v1", "v1", "serving", "host", "3", "3.0", "MiB", "of"]
    assert "75 %" in shown
    assert "of 4.0 GiB" in shown
    assert "disk is not used: EIO" in shown
    assert "9 taken, 2 dropped, 5 new at workers; 2 peers, 1 leases, 3 starts" in shown
    assert "failed_writes:disk_EIO 4" in shown
    assert "top prefixes ab12ab12ab12 40×" in shown
    assert "store-v2: no memory" in shown


def test_programs_get_all_of_it_as_json(admin):
    [store] = json.loads(invoke("--json").output)
    assert store["tiers"][0]["max_blocks"] == 4
    assert store["num_new"] == 5


def test_without_a_store_the_table_says_how_to_have_one(admin):
    admin._stores = []
    assert "--store MIB" in invoke().output


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["--yes"], DropBody()),
        (["--version", "v1", "-y"], DropBody("v1")),
        (["--all", "-y"], DropBody(None, every_version=True)),
    ],
)
def test_a_drop_names_the_stores_that_it_means(admin, words, body):
    done = invoke("drop", *words)
    assert done.exit_code == 0
    assert "store-v1: told to drop all blocks" in done.output
    assert admin.dropped == [body]


@pytest.mark.parametrize(("said", "drops"), [("y\n", 1), ("n\n", 0), ("", 0)])
def test_a_drop_is_asked_about_first(admin, said, drops):
    done = invoke("drop", input=said)
    assert "All blocks of store-v1 are lost" in done.output
    assert len(admin.dropped) == drops
    assert done.exit_code == 1 - drops


def test_a_refused_drop_is_an_error(admin):
    admin._stores = []
    done = invoke("drop", "--yes")
    assert isinstance(done.exception, AdminError)
    assert done.exception.status == 404


def warm(monkeypatch, tmp_path, *, status=200, text='{"prompt": "a"}\n{"prompt": "b"}\n'):
    """Runs `warm` with a gateway that answers with this status."""
    usage = {"prompt_tokens": 7}

    def handle(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(status, json={"usage": usage, "error": {"message": "no room"}})

    real = httpx.Client
    monkeypatch.setattr(
        store.httpx,
        "Client",
        lambda **given: real(transport=httpx.MockTransport(handle), base_url=given["base_url"]),
    )
    monkeypatch.setattr(store, "until_taken", lambda ask, **_: ask())
    (tmp_path / "prompts").write_text(text)
    return invoke("warm", str(tmp_path / "prompts"), "--url", "http://g", "--json")


def test_warming_reports_computed_and_kept_tokens(admin, monkeypatch, tmp_path):
    done = warm(monkeypatch, tmp_path)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["computed"]["prompt_tokens"] == 14
    assert told["kept"] == [{"store": "store-v1", "by_tier": {"host": 48, "disk": 128}}]


def test_a_failed_prompt_gives_status_1(admin, monkeypatch, tmp_path):
    done = warm(monkeypatch, tmp_path, status=503)
    assert done.exit_code == 1
    assert "a prompt failed: no room" in done.output


@pytest.mark.parametrize(
    ("text", "stores", "reason"),
    [
        ("\n", [STORE], "has no prompt"),
        ('{"prompt": "a"}\nx\n', [STORE], "line 2"),
        ('{"prompt": "a"}\n', [], "nothing would be kept"),
    ],
)
def test_nothing_is_sent_where_nothing_would_be_kept(
    admin, monkeypatch, tmp_path, text, stores, reason
):
    admin._stores = stores
    monkeypatch.setattr(store, "compute", None)  # a call would fail
    done = warm(monkeypatch, tmp_path, text=text)
    assert reason in str(done.exception)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0.0 MiB"), (2**20, "1.0 MiB"), (2**31, "2.0 GiB")]
)
def test_sizes_have_units(num_bytes, text):
    assert size_text(num_bytes) == text
