"""`baton config` prints the effective settings, and names wrong settings."""

import json

import pytest
from typer.testing import CliRunner

from deploy.commands.main import app
from engine.config_reference import reference_text
from engine.errors import ConfigError


def invoke(*words, **environment):
    return CliRunner().invoke(app, ["config", *words], env={"COLUMNS": "200", **environment})


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "baton.toml"
        path.write_text(text)
        return str(path)

    return write


def test_show_has_every_source(toml):
    path = toml('[worker]\nkv_mib = 64\n[admin]\nkey = "secret"\n')
    done = invoke("show", "--changed", "--json", "-c", path, BATON_GATEWAY__PORT="9000")
    values = {name: each["value"] for name, each in json.loads(done.output).items()}
    assert values == {"worker.kv_mib": "64", "gateway.port": "9000", "admin.key": '"(hidden)"'}


def test_show_marks_defaults():
    lines = invoke("show").output.splitlines()
    [line] = [line for line in lines if "worker.kv_mib" in line]
    assert line.split()[1:] == ['"none"', "default"]


def test_reference_is_the_page():
    assert invoke("reference").output == reference_text()
    names = [each["variable"] for each in json.loads(invoke("reference", "--json").output)]
    assert "BATON_WORKER__KV_MIB" in names


def test_check_accepts_a_good_file(toml):
    done = invoke("check", "-c", toml("[worker]\nkv_mib = 64\n"))
    assert done.exit_code == 0
    assert "1 settings differ" in done.output


FOUR = """
[worker]
kv_mb = 64
block_size = 0
[router]
policy = "sol"
[models.small]
model = "m"
idle = 3
[models.large]
model = "m"
prefill = -1
[store]
memory_mib = "many"
disk = "/d"
[gatway]
port = 1
"""


def test_check_names_every_error_once(toml):
    done = invoke("check", "-c", toml(FOUR))
    lines = str(done.exception).splitlines()
    for said in (
        "`kv_mb` - at `$.worker`; did you mean worker.kv_mib",
        "Expected `int` >= 1 - at `$.worker.block_size`",
        "'sol' - at `$.router.policy`; did you mean slo",
        "`idle` - at `$.models[...]`; did you mean models.NAME.idle_s",
        "Expected `int` >= 0 - at `$.models[...].prefill`",
        "Expected `int`, got `str` - at `$.store.memory_mib`",
        "`gatway`; did you mean gateway",
    ):
        assert len([line for line in lines if said in line]) == 1, (said, lines)
    assert len(lines) == 7, "what follows from another error is not told"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[worker]\nkv_mb = 64\n", r"did you mean worker\.kv_mib"),
        ('[router]\npolicy = "sol"\n', "did you mean slo"),
        ("[gateway]\nkv_mib = 64\n", r"did you mean worker\.kv_mib"),
        ("[worker]\nkv_mib = -1\n", r"worker\.kv_mib"),
    ],
)
def test_check_names_the_fault(toml, text, said):
    done = invoke("check", "-c", toml(text))
    assert done.exit_code == 1
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=said):
        raise done.exception
