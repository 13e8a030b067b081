"""Runs `bench elastic-live` on a real deployment; sets its pools before each run."""

import asyncio
from collections.abc import Sequence
from random import Random

import uvloop

from bench.client.answers import Answer, Endpoint, Failure, request_body
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.waiting import holds_within
from bench.elastic_live.plan import (
    COOL_DOWN_S,
    MAX_RUNNING,
    MIXES,
    READING,
    LiveMix,
    LivePlan,
    MeasuredPace,
    answered_per_s,
    load_of,
    name_of,
    num_at_once,
    order_of,
)
from bench.elastic_live.results import LiveRun
from bench.lab.streams import linked_checkpoint
from bench.processes.deployment import OperatedDeployment, operated
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient, run_open_loop
from engine.clock import MonotonicClock
from engine.config import PlannerMode
from engine.errors import BatonError

REQUEST_TIMEOUT_S = 60.0
SETTLED_WITHIN_S = 30.0
RAMP_S, WINDOW_S = 3.0, 8.0  # warm-up and measured part of a closed loop


class PaceUnknown(BatonError):
    """The deployment failed before the load began."""


def measure(plan: LivePlan, say: Say = say_nothing) -> tuple[MeasuredPace, list[LiveRun]]:
    """Carries out the plan. Raises ServerFailed, ServerUnreachable, PaceUnknown, OrderFailed."""
    even = plan.num_workers // 2
    options = {
        "--prefill": even,
        "--decode": plan.num_workers - even,
        "--max-workers": plan.num_workers,
        "--threads": 1,
    }
    environment = {
        "BATON_WORKER__MAX_RUNNING": str(MAX_RUNNING),
        "BATON_PLANNER__COOL_DOWN_S": str(COOL_DOWN_S),
    }
    say(f"weights of {plan.shape}")
    with linked_checkpoint(plan.shape, seed=plan.seed) as checkpoint:
        say(f"starting {plan.num_workers} workers")
        with operated(checkpoint, options, environment) as deployment:
            vocab = plain_token_ids(checkpoint)
            found: tuple[MeasuredPace, list[LiveRun]] = uvloop.run(
                _measure(plan, vocab, deployment, say)
            )
    return found


async def _measure(
    plan: LivePlan, vocab: Sequence[int], deployment: OperatedDeployment, say: Say
) -> tuple[MeasuredPace, list[LiveRun]]:
    async with deployment.connected(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(deployment.url), MonotonicClock())
        bench = _Bench(plan, vocab, deployment, client, await client.first_model())
        pace = await bench.pace()
        for mix in MIXES:
            say(f"{mix.name}: {pace.one[mix]:.2f}/s by one, {pace.most[mix]:.2f}/s by all but one")
        runs = []
        for repeat in range(plan.num_repeats):
            for setting in order_of(plan, repeat):
                run = await bench.run(setting, pace, repeat)
                runs.append(run)
                good, num = run.num_good(pace.slo), len(run.load.outcomes)
                name = name_of(plan, setting)
                say(f"repetition {repeat + 1}, {name}: {good} of {num}, {run.num_flips} flips")
        return pace, runs


class _Bench:
    """Sends requests and orders to one deployment."""

    def __init__(
        self,
        plan: LivePlan,
        vocab: Sequence[int],
        deployment: OperatedDeployment,
        client: ServeClient,
        model: str,
    ) -> None:
        self._plan = plan
        self._deployment = deployment
        self._client = client
        self._model = model
        self._vocab = vocab
        self._clock = MonotonicClock()

    async def pace(self) -> MeasuredPace:
        """Measures each mix with one worker of the scarce role, and with all but one."""
        total = self._plan.num_workers
        one: dict[LiveMix, float] = {}
        most: dict[LiveMix, float] = {}
        for mix in MIXES:
            for answered, num in ((one, 1), (most, total - 1)):
                await self._set(num if mix is READING else total - num)
                answered[mix] = await self._answered_per_s(mix, num)
        return MeasuredPace(total - 1, one, most)

    async def _answered_per_s(self, mix: LiveMix, num_workers: int) -> float:
        """Returns the requests/s of a closed loop."""
        rng = Random(f"{self._plan.seed}/pace/{mix.name}/{num_workers}")
        begin_s = self._clock.now_s() + RAMP_S
        end_s = begin_s + WINDOW_S
        answers: list[Sequence[float]] = []  # the times of their chunks

        async def ask() -> None:
            while self._clock.now_s() < end_s:
                answers.append((await self._answer(mix, rng)).chunk_times_s)

        await asyncio.gather(*(ask() for _ in range(num_at_once(mix, num_workers))))
        found_per_s = answered_per_s(answers, begin_s, end_s)
        if not found_per_s:
            raise PaceUnknown(f"no request of {mix.name} was answered in {WINDOW_S:g} s")
        return found_per_s

    async def run(self, setting: int | None, pace: MeasuredPace, repeat: int) -> LiveRun:
        """Plays the whole load in one setting."""
        plan = self._plan
        await self._set(plan.num_workers // 2 if setting is None else setting)
        num_flips = await self._num_flips()
        if setting is None:
            await self._deployment.set_planner(PlannerMode.ON)
        load = list(load_of(plan, pace, repeat))
        rng = Random(f"{plan.seed}/prompts/{repeat}/{setting}")
        bodies = [self._body(mix, rng) for _, mix in load]
        found = await run_open_loop(
            self._client.send, bodies, [due_s for due_s, _ in load], clock=self._clock
        )
        await self._deployment.set_planner(PlannerMode.OFF)
        return LiveRun(setting, repeat, found, await self._num_flips() - num_flips)

    async def _set(self, num_prefill: int) -> None:
        """Sets the pools and waits for them. Raises OrderFailed, PaceUnknown."""
        await self._deployment.set_pools(num_prefill, self._plan.num_workers - num_prefill)

        async def is_settled() -> bool:
            return (await self._deployment.look()).settled

        if not await holds_within(is_settled, SETTLED_WITHIN_S, self._clock):
            raise PaceUnknown(f"the pools were not settled in {SETTLED_WITHIN_S:g} s")

    async def _num_flips(self) -> int:
        return (await self._deployment.look()).counters.get("flips", 0)

    async def _answer(self, mix: LiveMix, rng: Random) -> Answer:
        result = await self._client.send(self._body(mix, rng))
        if isinstance(result, Failure):
            raise PaceUnknown(f"a request of {mix.name} was not answered: {result.detail}")
        return result

    def _body(self, mix: LiveMix, rng: Random) -> bytes:
        prompt: Sequence[int] = rng.choices(self._vocab, k=mix.input_len)
        return request_body(
            Endpoint.COMPLETIONS,
            [*prompt],
            model=self._model,
            output_len=mix.output_len,
            temperature=0.0,
        )
