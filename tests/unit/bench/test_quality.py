"""The command `baton bench quality`, tested without torch."""

import sys

from typer.testing import CliRunner

from bench.cli import app


def test_quality_names_the_extra_to_install_if_torch_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bench.quality.run", raising=False)
    result = CliRunner().invoke(app, ["quality", "--quick"])
    assert result.exit_code == 1
    assert "pip install 'baton-serve[worker]'" in result.stderr
