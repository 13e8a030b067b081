"""Grammars that once crashed a gateway or a worker are refused, and other streams continue."""

import json
import threading
import time

import httpx
import pytest

from tests.kits.services.served import matching, metrics, services

pytestmark = pytest.mark.torch

# seconds; tests run three in parallel, while `baton bench hostile` needs a quiet machine
MAX_GAP_S = 1.0
TIMEOUT_S = 60.0
MODEL = "baton-bundled"


def function(parameters, **more):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


def nested(levels):
    return json.loads('{"const":' + "[" * levels + "]" * levels + "}")


OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}}
ATTACKS = {
    "32 kB of newlines": {"guided_grammar": "\n" * 32_768},
    "products of multiples": {
        "guided_json": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}
    },
    "remainders that meet": {
        "guided_json": {"anyOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}
    },
    "40 patterns": {
        "guided_json": {"allOf": [{"type": "string", "pattern": f"a{i}.*b{i}"} for i in range(40)]}
    },
    "3,000 optional properties": {"guided_json": OPTIONAL},
    "3,000 optional arguments": {"tools": function(OPTIONAL, strict=True)},
    "nesting near 985": {"guided_json": nested(480)},
    "nesting near 985 in text": {"guided_json": '{"const":' + "[" * 985 + "]" * 985 + "}"},
    "nesting in a tool": {"tools": function(nested(480))},
    "a field's name in escapes": {"guided_regex": "["},
}


def gaps_of_streams(url, stop, gaps):
    """Runs one stream after another until `stop` is set; returns the gaps between tokens."""
    body = {"model": MODEL, "prompt": "import sys\n", "max_tokens": 200, "stream": True}
    with httpx.Client(timeout=TIMEOUT_S) as client:
        while not stop.is_set():
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                last_s = None
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        if last_s is not None:
                            gaps.append(now_s - last_s)
                        last_s = now_s


def attack(client, url, fields):
    message = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    text = json.dumps({**message, **fields}).replace('"guided_regex"', '"guided\\u005fregex"')
    headers = {"content-type": "application/json"}
    return client.post(f"{url}/v1/chat/completions", content=text, headers=headers)


def test_hostile_grammars_are_refused_while_streams_go_on(served):
    stop, gaps = threading.Event(), []
    with httpx.Client(timeout=TIMEOUT_S) as client:
        assert attack(client, served.url, {"guided_json": {"enum": ["yes"]}}).status_code == 200
        before = services()
        streaming = threading.Thread(target=gaps_of_streams, args=(served.url, stop, gaps))
        streaming.start()
        try:
            loose = attack(client, served.url, {"tools": function(OPTIONAL)})
            assert loose.status_code == 200
            assert loose.headers["x-baton-ignored"] == "tools[0].function.parameters"
            for name, fields in ATTACKS.items():
                answer = attack(client, served.url, fields)
                assert answer.status_code == 400, (name, answer.text)
                assert answer.json()["error"]["param"], (name, answer.text)
            legit = attack(client, served.url, {"guided_json": {"enum": ["no"]}})
            assert legit.json()["choices"][0]["message"]["content"] == '"no"'
        finally:
            stop.set()
            streaming.join(TIMEOUT_S)
    assert len(gaps) > 20
    assert max(gaps) < MAX_GAP_S, sorted(gaps)[-5:]
    assert before <= services()
    verdicts = matching("baton_grammars_total", metrics(served.url))
    assert sum(count for name, count in verdicts.items() if "slow" in name) > 0
