"""Numbers in the documents equal the reports in the repository."""

import pytest

from bench.common.report import Goals, Hardware, Peer, Report, Result, to_json
from bench.published import Headline, fault_of, fill_in, read_reports, stale_documents
from engine.errors import ConfigError

SPEED = Result("prefill/int8", 2048.0, "tokens/s", (1024.0, 2048.0, 2100.0), 4096.0, 0.5)
LOAD = Result("load/int8", 1.5, "s", (1.5,), peers={"vllm": Peer(3.0, 0.5)})
REPORT = Report(
    bench="engine",
    command="baton bench engine --peer vllm=PYTHON",
    date="2026-01-31T12:00:00+00:00",
    commit="0123456789",
    hardware=Hardware("a cpu", 2, 2**30, (), "3.11"),
    seed=0,
    config={"version_vllm": "0.9"},
    results=(SPEED, LOAD),
)
REPORTS = {"engine": REPORT}
DOCUMENT = """Text before.

<!-- report: engine -->
an old figure
<!-- end -->

Text after.
"""


def test_documents_of_this_repository_show_the_figures_of_its_reports():
    assert stale_documents() == {}, "run: baton bench report --write"


def test_block_holds_command_place_time_and_every_result():
    assert (
        fill_in(DOCUMENT, REPORTS, ())
        == """Text before.

<!-- report: engine -->
```bash
baton bench engine --peer vllm=PYTHON
```

2026-01-31 · commit `0123456` · a cpu · 2 cores · Python 3.11 · seed 0 · vllm 0.9

| result | value | unit | least … most | limit | of limit | vllm | × vllm |
| --- | --- | --- | --- | --- | --- | --- | --- |
| `prefill/int8` | 2,048 | tokens/s | 1,024 … 2,100 | 4,096 | 50% |  |  |
| `load/int8` | 1.50 | s |  |  |  | 3 | 0.50 |
<!-- end -->

Text after.
"""
    )


def test_the_command_of_a_finished_study_names_its_commit():
    text = fill_in("<!-- report: tiers -->\n<!-- end -->", {"tiers": REPORT}, ())
    assert "```text\nbaton bench engine --peer vllm=PYTHON  # at commit b099256\n```" in text


def test_patterns_choose_results():
    text = fill_in("<!-- report: engine load/* -->\n<!-- end -->", REPORTS, ())
    assert "load/int8" in text
    assert "prefill" not in text
    with pytest.raises(ConfigError, match="engine has no result decode"):
        fill_in("<!-- report: engine decode/* -->\n<!-- end -->", REPORTS, ())


def test_goals_stand_in_the_table():
    goals = Goals({"prefill/*": 3000.0, "load/*": 2.0}, at_most=("load/*",))
    text = fill_in(DOCUMENT, REPORTS, (), {"engine": goals})
    assert "| 3,000 | no |" in text
    assert "| 2 | yes |" in text


def test_headlines_stand_beside_their_peer_or_limit():
    rows = (
        Headline("load", "engine", "load/int8", "vllm"),
        Headline("prefill", "engine", "prefill/int8"),
        Headline("unmeasured", "kv", "shm"),
    )
    text = fill_in("<!-- headline -->\n<!-- end -->", REPORTS, rows)
    assert "| load | 1.50 s | vllm 0.9: 3 | 0.50 | `baton bench engine` |" in text
    assert "| prefill | 2,048 tokens/s | this machine's limit: 4,096 | 50% |" in text
    assert "unmeasured" not in text


@pytest.mark.parametrize(("result", "peer"), [("decode", None), ("load/int8", "llamacpp")])
def test_headline_of_a_figure_that_its_report_lacks_is_an_error(result, peer):
    rows = (Headline("x", "engine", result, peer),)
    with pytest.raises(ConfigError, match="engine has no result"):
        fill_in("<!-- headline -->\n<!-- end -->", REPORTS, rows)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data.replace(b'"value": 1.5', b'"value": "fast"'), "float"),
        (
            lambda data: data.replace(b'"seed": 0', b'"seed": 0, "note": "x"'),
            "fields that no report has",
        ),
        (lambda data: data.replace(b"0123456789", b"0123456789-dirty"), "not measured at a commit"),
        (lambda data: data.replace(b"2026-01-31T", b"yesterday "), "is not a date"),
        (lambda data: data.replace(b"load/int8", b"prefill/int8"), "the same name"),
    ],
)
def test_report_that_cannot_be_published_is_refused(tmp_path, edit, said):
    (tmp_path / "engine.json").write_bytes(edit(to_json(REPORT)))
    with pytest.raises(ConfigError, match=said):
        read_reports(tmp_path)


def test_report_without_results_cannot_be_published():
    empty = Report("x", "c", REPORT.date, "abc", REPORT.hardware, 0, {}, ())
    assert fault_of(empty) == "it has no results"
    assert fault_of(REPORT) is None
