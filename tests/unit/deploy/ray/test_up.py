"""`baton.yaml`, the sequence of steps of `up` and `down`, and a cluster's answers."""

from pathlib import Path

import pytest

import deploy
from deploy.base.defaults import load_up_config, num_nodes_of, pools_of, read_cluster
from deploy.ray import cluster_nodes, up
from deploy.ray.cluster_nodes import CONSTRAINTS, LeftProcess, write_files
from deploy.ray.up import ClusterNode, RayUp, Running, Status, bring_up, cluster_of, take_down
from engine.control import Pools
from engine.errors import ConfigError

FOLDER = Path(deploy.__file__).parent / "cluster"
STATUS = Status(
    "session_1", (ClusterNode("10.0.0.1", is_alive=True, resources={"CPU": 4.0}),), None
)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "baton.yaml"


def test_file_is_read_into_cluster_model_pools_and_configuration(file):
    file.write_text(
        "cluster: onprem.yaml\nmodel: hf://org/name@v1\npools: {prefill: 3, decode: 5}\n"
        "gateway: {host: 0.0.0.0, keys_file: ~/k}\nworker: {kv_mib: 64}\n"
    )
    config = load_up_config(file)
    assert config.cluster == file.parent / "onprem.yaml"
    assert config.model == "hf://org/name@v1"
    assert pools_of(config.config.pools) == Pools(3, 5)
    assert config.config.gateway.keys_file == "~/k"
    assert config.config.worker.kv_mib == 64
    assert isinstance(cluster_of(config), RayUp)


def test_running_cluster_is_named_by_its_address(file):
    file.write_text("address: auto\n")
    config = load_up_config(file)
    assert (config.address, pools_of(config.config.pools)) == ("auto", Pools(1, 1))
    assert isinstance(cluster_of(config), Running)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: /m\n", "give one of `cluster` and `address`"),
        ("cluster: a.yaml\naddress: auto\n", "give one of `cluster` and `address`"),
        ("address: auto\nworkers: {}\n", "unknown field `workers`"),
        ("address: auto\npools: {prefil: 2}\n", "prefil"),
        ("address: auto\npools: {prefill: 1, decode: 0}\n", "need a prefill and a decode worker"),
        ("address: auto\nworker: {kv_mib: many}\n", r"Expected `int \| null`"),
        ("- a list\n", "must hold names and values"),
        ("a: [b\n", "while parsing"),
    ],
)
def test_error_in_the_file_is_named(file, text, complaint):
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_up_config(file)


def test_missing_file_is_named(file):
    with pytest.raises(ConfigError, match=r"baton\.yaml: No such file"):
        load_up_config(file)


@pytest.mark.parametrize("name", ["onprem", "aws", "gcp"])
def test_cluster_file_with_a_placeholder_is_refused(name):
    with pytest.raises(ConfigError, match=r"<.*> is not filled in"):
        read_cluster(FOLDER / f"{name}.yaml")


def test_example_puts_each_pool_on_its_own_nodes():
    config = load_up_config(FOLDER / "baton.yaml")
    pools = config.config.pools
    assert (pools.prefill_resource, pools.decode_resource) == ("prefill_node", "decode_node")
    assert config.cluster == FOLDER / "onprem.yaml"


@pytest.mark.parametrize(
    ("cluster", "num_nodes"),
    [
        ({"provider": {"type": "local", "worker_ips": ["a", "b"]}, "min_workers": 1}, 2),
        ({"provider": {"type": "local", "worker_ips": ["a", "b"]}}, 3),
        ({"provider": {"type": "local"}}, 1),
        (
            {
                "provider": {"type": "aws"},
                "available_node_types": {"head": {}, "one": {"min_workers": 2}},
            },
            3,
        ),
    ],
)
def test_up_waits_for_all_nodes_of_the_file(cluster, num_nodes):
    assert num_nodes_of(cluster) == num_nodes


class FakeCluster:
    """A cluster that records its calls."""

    def __init__(self, *, is_up=True, left=(), error=None) -> None:
        self._is_up = is_up
        self._left = list(left)
        self._error = error
        self.asked: list[str] = []

    def is_up(self):
        return self._is_up

    def up(self):
        self.asked.append("up")

    def ask(self, verb, file=None):
        self.asked.append(verb if file is None else f"{verb} {file.name}")
        if self._error is not None:
            raise ConfigError(self._error)
        return STATUS

    def down(self):
        self.asked.append("down")
        return self._left


def test_up_makes_the_cluster_only_if_there_is_none(file):
    there, absent = FakeCluster(), FakeCluster(is_up=False)
    assert bring_up(there, file, lambda _: None) == STATUS
    assert there.asked == ["start baton.yaml"]
    bring_up(absent, file, lambda _: None)
    assert absent.asked == ["up", "start baton.yaml"]


def test_down_stops_baton_first_and_ends_even_a_silent_cluster():
    told: list[str] = []
    left = [LeftProcess("10.0.0.1", "process 7: raylet", 7)]
    cluster = FakeCluster(left=left, error="no answer")
    assert take_down(cluster, told.append) == left
    assert cluster.asked == ["stop", "down"]
    assert "no answer; the cluster is taken down anyway" in told


def test_answer_is_found_behind_lines_of_shells_and_ray():
    printed = 'Welcome!\r\nINFO x\r\nBATON-ANSWER {"status":{"session":"s","nodes":[]}}\r\nShared'
    with pytest.raises(ConfigError, match=r"another version of Baton: .*`pools`"):
        up._status(printed)
    whole = printed.replace("[]", '[],"pools":null')
    assert up._status(whole) == Status("s", (), None)


def test_error_of_the_head_is_raised():
    with pytest.raises(ConfigError, match=r"^no such model$"):
        up._status('BATON-ANSWER {"error":"no such model"}')


def test_head_without_an_answer_is_reported_with_its_last_lines():
    with pytest.raises(ConfigError, match=r"no answer: bash: python: command not found$"):
        up._status("bash: python: command not found\r\nShared connection to 10.0.0.1 closed.\r\n")


def test_only_own_machines_are_searched_afterwards():
    local = {"provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}}
    assert cluster_nodes.nodes_of(local) == ["10.0.0.1", "10.0.0.2"]
    assert cluster_nodes.nodes_of({"provider": {"type": "aws"}}) == []


def test_ssh_uses_the_settings_of_the_cluster_file():
    command = cluster_nodes.ssh_command(
        {"ssh_user": "me", "ssh_private_key": "/keys/one", "ssh_proxy_command": "nc %h %p"}
    )
    assert command[:3] == ["ssh", "-i", "/keys/one"]
    assert "ProxyCommand=nc %h %p" in command
    assert "BatchMode=yes" in command


ONE_MACHINE = """
cluster_name: one
provider: {type: local, head_ip: 10.0.0.1, worker_ips: []}
auth: {ssh_user: me}
"""


@pytest.fixture
def ray_up(tmp_path, monkeypatch) -> RayUp:
    """A cluster of one machine of the user, whose head does not answer."""
    file = tmp_path / "one.yaml"
    file.write_text(ONE_MACHINE)
    monkeypatch.setattr(up, "_ray", lambda *_, **__: "no route")
    return RayUp(file, tmp_path / "notes")


@pytest.mark.parametrize("what", ["process 7: raylet", "cannot be searched: no route"])
def test_cluster_that_may_still_run_is_not_made_again(ray_up, monkeypatch, what):
    monkeypatch.setattr(cluster_nodes, "_ask", lambda _, node, script: [LeftProcess(node, what)])
    assert not ray_up.is_up()  # the head has never answered
    ray_up._write_note("session_1")
    with pytest.raises(ConfigError, match=f"no answer: no route, .*{what}.* `baton down` first"):
        ray_up.is_up()
    monkeypatch.setattr(cluster_nodes, "_ask", lambda *_: [])
    assert not ray_up.is_up()


def test_cluster_of_another_version_is_not_made_again(ray_up, monkeypatch):
    monkeypatch.setattr(up, "_ray", lambda *_, **__: 'BATON-ANSWER {"status":{"session":"s"}}')
    with pytest.raises(ConfigError, match="another version"):
        ray_up.is_up()


def test_incomplete_note_ends_no_process(ray_up, monkeypatch):
    scripts: list[str] = []
    monkeypatch.setattr(cluster_nodes, "_ask", lambda _, node, script: scripts.append(script) or [])
    ray_up._write_note("\n")
    assert ray_up.down() == []
    assert len(scripts) == 1
    assert scripts[0].startswith(f"session={cluster_nodes.ANY_RAY}\n")
    assert "kill" not in scripts[0]
    for ask in (cluster_nodes.look, cluster_nodes.end):
        with pytest.raises(AssertionError, match="every process"):
            ask({"provider": {"type": "local", "head_ip": "a"}}, "")


def test_token_is_made_once_and_readable_by_its_owner_only(tmp_path):
    write_files(tmp_path)
    token = tmp_path / ".baton" / "ray_auth_token"
    first = token.read_text()
    assert len(first) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    write_files(tmp_path)
    assert token.read_text() == first
    assert (token.parent / "constraints.txt").read_text() == CONSTRAINTS.read_text()
    assert {path.name for path in token.parent.iterdir()} == {"ray_auth_token", "constraints.txt"}


@pytest.mark.parametrize(("mode", "complaint"), [(0o644, "read by others"), (0o666, "write to it")])
def test_token_open_to_other_users_is_refused(tmp_path, mode, complaint):
    write_files(tmp_path)
    (tmp_path / ".baton" / "ray_auth_token").chmod(mode)
    with pytest.raises(ConfigError, match=complaint):
        write_files(tmp_path)


def test_folder_writable_by_others_is_refused(tmp_path):
    (tmp_path / ".baton").mkdir(mode=0o777)
    (tmp_path / ".baton").chmod(0o777)
    with pytest.raises(ConfigError, match="is not to be trusted"):
        write_files(tmp_path)
