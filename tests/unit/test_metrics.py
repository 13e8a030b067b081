"""docs/users/metrics.md explains every metric, and every worker counter has a help text."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.gateway.metrics.stores import OF_TIERS, STORE_TEXTS, TIER_TEXTS
from router.gateway.metrics.workers import COUNTER_TEXTS
from tests.kits.tree import metric_table
from tests.kits.tree.documents import ROOT

OBSERVABILITY = ROOT / "deploy" / "observability"
RECORDING = OBSERVABILITY / "rules" / "baton_recording.yml"
EXPRESSION = re.compile(r"expr: (?!\|)(.+)|expr: \|\n((?: {10}.+\n)+)")
STORE_CODE = ROOT / "kvtransfer" / "store"
COUNTED_APART = {"drafted", "accepted", "accepted_len"}
COUNT = re.compile(r"""count(?:er)?s\[f?"([a-z_]+)|_count\(\s*f?"([a-z_]+)|refused\[f?"([a-z_]+)""")


def test_the_page_has_the_tables_of_the_code():
    text = (ROOT / "docs/users/metrics.md").read_text()
    _, _, rest = text.partition("<!-- metrics -->\n")
    assert rest.partition("<!-- end -->")[0] == "\n" + metric_table.tables(), (
        "write the output of `python -m tests.kits.tree.metric_table` there"
    )


def counted_in(*folders: str) -> set[str]:
    """Returns the names of counters in the code of these folders, without the stores' in
    `kvtransfer`."""
    counted = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if "kvtransfer/store" in folder or STORE_CODE not in path.parents:
                for found in COUNT.findall(path.read_text()):
                    counted.update(name for name in found if name)
    return counted


def test_every_count_of_a_worker_has_a_text():
    counted = counted_in("engine", "prefill", "decode", "kvtransfer", "deploy/worker")
    missing = counted - set(COUNTER_TEXTS) - COUNTED_APART
    assert not missing
    assert len(counted) > 20


def test_every_count_of_a_store_has_a_text():
    own = counted_in("kvtransfer/store", "deploy/store")
    shared = counted_in("kvtransfer", "engine/net")
    in_tiers = counted_in("kvtransfer/store/disk", "kvtransfer/store/objects")
    assert not shared - set(STORE_TEXTS)
    assert not in_tiers - set(TIER_TEXTS)
    assert not own - set(STORE_TEXTS) - set(OF_TIERS) - in_tiers
    assert len(own) > 15


def test_names_follow_prometheus_conventions():
    """Checks the rules of `promtool check metrics`; promtool itself runs in tests/e2e."""
    for family in text_string_to_metric_families(metric_table.full_page()):
        assert family.documentation, family.name
        assert re.fullmatch(r"(baton|process|http)_[a-z0-9_]+|vllm:[a-z0-9_]+", family.name)
        assert not re.search(r"_(ms|secs|mb|kb|count|bucket|sum|total)$", family.name)
        series = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(set(series)) == len(series), family.name


def shipped_expressions() -> list[tuple[str, str]]:
    """Returns the expressions of shipped rules and dashboards, each with its file."""
    found = []
    for path in sorted((OBSERVABILITY / "rules").glob("*s.yml")):
        found += [(path.name, one or more) for one, more in EXPRESSION.findall(path.read_text())]
    for path in sorted((OBSERVABILITY / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        targets = (t for panel in board["panels"] for t in panel.get("targets", ()))
        found += [(path.name, target["expr"]) for target in targets]
    return found


@pytest.mark.parametrize(("file", "expression"), shipped_expressions())
def test_rules_and_dashboards_ask_for_metrics_that_exist(file, expression):
    exported = {sample.name for family in metric_table.full_families() for sample in family.samples}
    exported |= {family.name for family in metric_table.full_families()}
    exported |= {f"{family.name}_total" for family in metric_table.full_families()}
    recorded = set(re.findall(r"record: (\S+)", RECORDING.read_text()))
    names = set(
        re.findall(r"\b(?:baton[_:]|process_)[a-z0-9_:]*\b", re.sub(r'"[^"]*"', "", expression))
    )
    assert names - exported - recorded == set(), file


@pytest.mark.parametrize("path", sorted((OBSERVABILITY / "grafana").glob("*.json")), ids=str)
def test_dashboards_take_their_data_source_from_a_variable(path):
    board = json.loads(path.read_text())
    assert board["templating"]["list"][0] == {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    sources = set(re.findall(r'"uid": "([^"]*)"', path.read_text())) - {board["uid"]}
    assert sources == {"${datasource}"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] for panel in board["panels"])
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_every_alert_has_a_test_and_says_what_to_do():
    _, *alerts = (OBSERVABILITY / "rules/baton_alerts.yml").read_text().split("- alert: ")
    tests = (OBSERVABILITY / "rules/baton_alerts_test.yml").read_text()
    for alert in alerts:
        name = alert.partition("\n")[0]
        assert re.search(r"severity: (critical|warning|info)\n", alert), name
        assert re.search(r"summary: .+\n +description: .+", alert), name
        assert name in tests, f"{name} has no test"
    assert len(alerts) > 20
