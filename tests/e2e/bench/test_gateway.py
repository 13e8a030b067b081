"""Runs `bench gateway` with real processes and the least load that gives results."""

from bench.common.command import say_nothing
from bench.lab.gateway.study import BARE, OURS, WRITES, GatewayStudy, StreamLoad, results


class FewStreams(GatewayStudy):
    """Runs eight concurrent streams."""

    __slots__ = ()

    @property
    def loads(self):
        return StreamLoad("64", 8, 1, 8), StreamLoad("512", 8, 1, 8, steps=5)


def test_all_servers_are_measured_with_all_loads():
    study = FewStreams(prompt_words=4, repeat=1, is_quick=True)
    measured = study.run(say_nothing)
    for server in (OURS, BARE, WRITES):
        for load in (study.serial, *study.loads):
            [run] = measured.of(server, load)
            assert len(run.ttft_s) == load.num_requests
            # Baton's first event gives the role; an event may carry several late tokens
            if server == OURS:
                most = load.total_tokens + load.num_requests
                assert 2 * load.num_requests <= run.num_events <= most
            else:
                assert run.num_events == load.total_tokens
            if load != study.serial:
                assert run.wall_s >= load.pace_s * (load.num_tokens - 2)
    found = {result.name: result.value for result in results(study, measured)}
    assert found["gateway/added_ttft_ms"] > 0
    assert found["gateway/tok_per_cpu_s"] > 0
