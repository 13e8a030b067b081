"""The metrics of answers, workers and the router."""

import msgspec
import pytest

from engine.messages import LoadReport, Role, WorkerId
from engine.worker.costs import CostErrors
from router.machine.requests import Forecast, Rejected, Update
from router.policies.base import Decision
from router.port import WorkerStatus
from tests.kits.router.gateway import (
    EOS,
    LENGTH,
    STOP,
    TIMELINE,
    V1,
    FakeRouter,
    make_app,
    post,
    samples,
    tokens,
)


def ask(app, **fields):
    return post(app, "/v1/completions", {"prompt": "yo", **fields})


def test_an_answer_is_measured():
    script = [tokens("ab"), tokens("c"), Update(token_ids=(EOS,), outcome=STOP, timeline=TIMELINE)]
    app = make_app(FakeRouter(script))
    ask(app)
    found = samples(app)
    # The clock advances at each reading: one for the body, three for the updates.
    assert found["baton_ttft_seconds_sum"] == {(V1,): 1.0}
    assert found["baton_itl_seconds_count"] == {(V1,): 2.0}
    assert found["baton_e2e_seconds_sum"] == {(V1,): 3.0}
    assert found["baton_tpot_seconds_sum"] == {(V1,): 2 / 3}
    assert found["baton_prompt_tokens_total"] == {(): 2.0}
    assert found["baton_generation_tokens_total"] == {(): 4.0}
    assert found["baton_requests_in_flight"] == {(): 0.0}
    stages = found["baton_stage_seconds_sum"]
    assert stages[(("stage", "prefill_compute"),)] == TIMELINE.prefill_compute_s
    assert (("stage", "decode_queue"),) not in stages  # the answer had no such stage
    # KV transfer is not a stage of its own
    assert not any("kv_transfer" in key[0] for key in stages)
    assert found["baton_kv_transfer_seconds_sum"] == {(): TIMELINE.kv_transfer_s}
    assert found["baton_kv_exposed_seconds_sum"] == {(): TIMELINE.kv_exposed_s}


def test_an_answer_without_a_handover_has_no_transfer():
    timeline = msgspec.structs.replace(TIMELINE, kv_transfer_s=None, kv_exposed_s=None)
    app = make_app(FakeRouter([Update(token_ids=(EOS,), outcome=STOP, timeline=timeline)]))
    ask(app)
    found = samples(app)
    assert found["baton_kv_transfer_seconds_count"] == {(): 0.0}
    assert found["baton_kv_exposed_seconds_count"] == {(): 0.0}


def test_counters_with_and_without_a_reason_are_one_series():
    router = FakeRouter()
    for name, counters in (("p0", {"fallbacks": 1.0}), ("d0", {"fallbacks:no shm": 2.0})):
        load = LoadReport(0, 0, 0, 0, 0, 0, 0, 0, counters)
        router.statuses[WorkerId(name)] = WorkerStatus(Role.MIXED, load, 0, 0)
    found = samples(make_app(router))["baton_worker_fallbacks_total"]
    assert {(dict(key)["worker"], dict(key)["reason"]): n for key, n in found.items()} == {
        ("p0", ""): 1.0,
        ("d0", "no shm"): 2.0,
    }


def test_requests_are_counted_by_their_outcome():
    router = FakeRouter([tokens("a", outcome=LENGTH)])
    app = make_app(router)
    ask(app)
    ask(app, temperature=7)
    router.script = [Update(outcome=Rejected("full", 1.0))]
    ask(app)
    counts = samples(app)["baton_requests_total"]
    assert {key[0][1]: value for key, value in counts.items() if value} == {
        "finished": 1.0,
        "invalid": 1.0,
        "rejected": 1.0,
    }


def test_workers_and_router_are_shown_as_they_are():
    router = FakeRouter()
    load = LoadReport(
        free_blocks=1,
        cached_blocks=2,
        owned_blocks=3,
        leased_blocks=4,
        in_flight_blocks=5,
        waiting_seqs=6,
        running_seqs=8,
        open_leases=9,
        counters={
            "preempted": 2.0,
            "pulled.bytes_total": 3.0,
            "pulls_failed:source_silent": 4.0,
            "pulls_failed:a block arrived damaged": 5.0,
        },
    )
    quiet = WorkerStatus(role=Role.PREFILL, load=None, reserved_blocks=0, reserved_tokens=0)
    busy = WorkerStatus(role=Role.DECODE, load=load, reserved_blocks=0, reserved_tokens=0)
    router.statuses = {WorkerId("p0"): quiet, WorkerId("d0"): busy}
    router.events = {("retry", "worker lost"): 3}
    found = samples(make_app(router))
    worker = (("role", "decode"), ("worker", "d0"))
    blocks = {dict(key)["state"]: value for key, value in found["baton_worker_blocks"].items()}
    assert blocks == {"free": 1, "cached": 2, "owned": 3, "leased": 4, "in_flight": 5}
    assert found["baton_worker_running_seqs"] == {worker: 8.0}
    assert found["baton_worker_preempted_total"] == {worker: 2.0}
    assert found["baton_worker_pulled_bytes_total"] == {worker: 3.0}
    failed = found["baton_worker_pulls_failed_total"]
    assert {dict(key)["reason"]: value for key, value in failed.items()} == {
        "source_silent": 4.0,
        "a block arrived damaged": 5.0,
    }
    assert {dict(key)["worker"] for key in failed} == {"d0"}
    assert found["baton_queue_requests"] == {(): 7.0}
    events = found["baton_router_events_total"]
    assert events == {(("event", "retry"), ("reason", "worker lost")): 3.0}
    assert dict(next(iter(found["baton_build_info"])))["fingerprint"] == "fp-1"
    model = (("model_name", "tiny"),)
    assert found["vllm:num_requests_running"] == {model: 8.0}
    assert found["vllm:num_requests_waiting"] == {model: 13.0}


def test_speculation_is_exported_by_proposer_and_accepted_length():
    router = FakeRouter()
    counters = {
        "drafted:ngram": 40.0,
        "drafted:draft": 10.0,
        "accepted:ngram": 30.0,
        "accepted:draft": 0.0,
        "accepted_len:0": 5.0,
        "accepted_len:4": 7.0,
        "accepted_len:40": 1.0,
        "steps": 50.0,
        "step_tokens": 120.0,
    }
    load = LoadReport(0, 0, 0, 0, 0, 0, 0, 0, counters)
    for name in ("d0", "d1"):
        router.statuses[WorkerId(name)] = WorkerStatus(Role.DECODE, load, 0, 0)
    found = samples(make_app(router))

    def of_d0(series):
        labels = [("role", "decode"), ("worker", "d0")]
        return {
            tuple(v for k, v in key if (k, v) not in labels): value
            for key, value in found[series].items()
            if ("worker", "d0") in key
        }

    assert of_d0("baton_draft_tokens_total") == {("ngram",): 40.0, ("draft",): 10.0}
    assert of_d0("baton_accepted_tokens_total") == {("ngram",): 30.0, ("draft",): 0.0}
    lengths = {float(bound): n for (bound,), n in of_d0("baton_accepted_length_bucket").items()}
    assert lengths[0.0] == lengths[3.0] == 5.0
    assert lengths[4.0] == lengths[32.0] == 12.0
    assert lengths[float("inf")] == 13.0
    assert of_d0("baton_accepted_length_count") == {(): 13.0}
    assert of_d0("baton_accepted_length_sum") == {(): 4 * 7.0 + 40.0}
    assert of_d0("baton_worker_step_tokens_total") == {(): 120.0}
    assert of_d0("baton_worker_steps_total") == {(): 50.0}
    assert not any("worker_drafted" in name or "worker_accepted" in name for name in found)
    model = (("model_name", "tiny"),)
    assert found["vllm:spec_decode_num_draft_tokens_total"] == {model: 100.0}
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == {model: 60.0}


def test_predictions_and_their_errors_are_exported():
    router = FakeRouter()
    errors = CostErrors(prefill=0.1, pull=0.3)
    known = Forecast(wait_s=0.5, tpot_s=0.02, errors=errors)
    router.statuses = {
        WorkerId("m0"): WorkerStatus(Role.MIXED, None, 0, 0, known),
        WorkerId("new"): WorkerStatus(Role.MIXED, None, 0, 0),
    }
    found = samples(make_app(router))
    worker = (("role", "mixed"), ("worker", "m0"))
    assert found["baton_worker_predicted_wait_seconds"] == {worker: 0.5}
    assert found["baton_worker_predicted_tpot_seconds"] == {worker: 0.02}
    assert found["baton_cost_error_ratio"] == {
        (("role", "mixed"), ("work", "prefill"), ("worker", "m0")): 0.1,
        (("role", "mixed"), ("work", "pull"), ("worker", "m0")): 0.3,
    }
    assert found["baton_queue_predicted_seconds"] == {(): 0.75}


def decided(**changes):
    """Returns a timeline with its decision; the stages after the placement sum to 0.75 s."""
    fields = {"predicted_ttft_s": 0.5, "predicted_tpot_s": 4.0, **changes}
    decision = Decision("slo", "why", "p0", "d0", num_candidates=1, num_matched_tokens=0, **fields)
    return msgspec.structs.replace(
        TIMELINE, prefill_queue_s=0.25, prefill_compute_s=0.5, decision=decision, attempts=1
    )


def predictions(timeline):
    script = [tokens("ab"), tokens("c"), Update(token_ids=(EOS,), outcome=STOP, timeline=timeline)]
    app = make_app(FakeRouter(script))
    ask(app)
    found = samples(app)
    ratios = found.get("baton_prediction_ratio_sum", {})
    predicted = [found[f"baton_predicted_{name}_seconds_sum"][()] for name in ("ttft", "tpot")]
    return {dict(key)["measure"]: ratio for key, ratio in ratios.items()}, predicted


def test_predictions_are_compared_with_measurements():
    # The clock advances at each reading, so the three tokens after the first took two seconds.
    assert predictions(decided()) == ({"ttft": 1.5, "tpot": 2 / 3 / 4}, [0.5, 4.0])
    only_ttft = decided(predicted_tpot_s=None)
    assert predictions(only_ttft) == ({"ttft": 1.5}, [0.5, 0.0])


def test_requests_placed_twice_or_without_prediction_are_not_compared():
    twice = msgspec.structs.replace(decided(), attempts=2)
    for timeline in (twice, decided(predicted_ttft_s=None, predicted_tpot_s=None), TIMELINE):
        assert predictions(timeline) == ({}, [0.0, 0.0])


def test_series_with_a_vllm_equivalent_also_have_its_name():
    app = make_app(FakeRouter())
    ask(app)
    found = samples(app)
    model = (("model_name", "tiny"),)
    assert found["vllm:prompt_tokens_total"] == {model: 2.0}
    assert found["vllm:generation_tokens_total"] == {model: 3.0}
    for ours, theirs in (
        ("baton_ttft_seconds", "vllm:time_to_first_token_seconds"),
        ("baton_itl_seconds", "vllm:inter_token_latency_seconds"),
        ("baton_e2e_seconds", "vllm:e2e_request_latency_seconds"),
    ):
        assert found[f"{theirs}_sum"] == {(*model, V1): found[f"{ours}_sum"][V1,]}
        assert len(found[f"{theirs}_bucket"]) == len(found[f"{ours}_bucket"])


def test_series_of_stages_reasons_and_workers_have_vllm_names_too():
    script = [tokens("ab"), Update(token_ids=(EOS,), outcome=STOP, timeline=TIMELINE)]
    router = FakeRouter(script)
    load = LoadReport(5, 2, 2, 1, 0, 0, 0, 0, {"flops": 9.0, "preempted": 4.0})
    router.statuses[WorkerId("d0")] = WorkerStatus(Role.DECODE, load, 0, 0)
    app = make_app(router)
    ask(app)
    found = samples(app)
    model = ("model_name", "tiny")
    assert found["vllm:request_prefill_time_seconds_sum"] == {(model,): TIMELINE.prefill_compute_s}
    queue_s = TIMELINE.queue_s + TIMELINE.prefill_queue_s
    assert found["vllm:request_queue_time_seconds_sum"] == {(model,): queue_s}
    assert found["vllm:request_decode_time_seconds_sum"] == {(model,): 1.0}
    assert found["vllm:request_success_total"] == {
        (("finished_reason", "stop"), model): 1.0,
        (("finished_reason", "length"), model): 0.0,
    }
    assert found["vllm:request_prompt_tokens_sum"] == {(model,): 2.0}
    assert found["vllm:request_generation_tokens_sum"] == {(model,): 3.0}
    assert found["vllm:prefix_cache_queries_total"] == {(model,): 2.0}
    assert found["vllm:prefix_cache_hits_total"] == {(model,): TIMELINE.num_cached_tokens}
    worker = (("engine", "d0"), model)
    assert found["vllm:kv_cache_usage_perc"] == {worker: 0.3}
    assert found["vllm:estimated_flops_per_gpu_total"] == {worker: 9.0}
    assert found["vllm:num_preemptions_total"] == {worker: 4.0}


def test_gauges_of_workers_have_their_names():
    router = FakeRouter()
    load = LoadReport(0, 0, 0, 0, 0, 0, 0, 0, gauges={"open_fds": 7.0})
    router.statuses[WorkerId("p0")] = WorkerStatus(Role.PREFILL, load, 0, 0)
    key = (("role", "prefill"), ("worker", "p0"))
    assert samples(make_app(router))["baton_worker_open_fds"] == {key: 7.0}


def test_http_answers_are_counted_by_status():
    app = make_app(FakeRouter([RuntimeError("a bug")], [tokens("ab", outcome=LENGTH)]))
    with pytest.raises(ExceptionGroup, match="unhandled"):
        ask(app)
    ask(app)
    ask(app, temperature="hot")
    post(app, "/v1/nothing", {})
    found = samples(app)["http_requests_total"]
    path = ("handler", "/v1/completions")
    counts = {(dict(key)["handler"], dict(key)["status"]): n for key, n in found.items()}
    assert counts == {
        (path[1], "5xx"): 1,
        (path[1], "2xx"): 1,
        (path[1], "4xx"): 1,
        ("other", "4xx"): 1,
    }


def test_severed_pairs_are_shown():
    router = FakeRouter()
    router.severed_pairs.append((WorkerId("p0"), WorkerId("d0")))
    found = samples(make_app(router))
    assert found["baton_severed_pairs"] == {(): 1.0}
    assert found["baton_severed_pair"] == {(("sink", "d0"), ("source", "p0")): 1.0}


def test_two_apps_share_no_metrics():
    first, second = make_app(FakeRouter()), make_app(FakeRouter())
    ask(first)
    assert samples(first)["baton_prompt_tokens_total"] == {(): 2.0}
    assert samples(second)["baton_prompt_tokens_total"] == {(): 0.0}
