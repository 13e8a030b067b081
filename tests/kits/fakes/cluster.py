"""Fake workers and gateways, and all messages between them, as a list of possible next moves."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from engine.messages import GatewayId, Limits, Sampling, WorkerId, decode_to_worker
from engine.worker.blocks import BlockHash, hash_blocks
from engine.worker.events import FromGateway, GatewayLost
from kvtransfer.messages import ToSink, ToSource, encode
from tests.kits.fakes.endpoint import Connection, FakeEndpoint
from tests.kits.fakes.gateway import Ask, FakeGateway, Link, Route
from tests.kits.fakes.model import BLOCK_SIZE, Kv, answer, kvs_of
from tests.kits.fakes.worker import FakeWorker, WorkerShape

# an action, and the worker whose state it changes
Move = tuple[Callable[[], None], FakeWorker | None]


class FakeCluster:
    """Workers, gateways and the messages between them."""

    def __init__(self, shapes: dict[str, WorkerShape]) -> None:
        self.now_s = 0.0
        self.gateways: dict[GatewayId, FakeGateway] = {}
        self.asks: list[Ask] = []
        self.block_contents: dict[BlockHash, list[Kv]] = {}
        self._connections: list[Connection] = []
        self._peers = count()
        # connections of gateways that have died
        self._orphans: list[tuple[GatewayId, WorkerId, Link]] = []
        self.workers = {WorkerId(n): FakeWorker(n, shape, self) for n, shape in shapes.items()}

    # ------------------------------------------------------------ actions of a test

    def add_gateway(self, name: str) -> FakeGateway:
        gateway = FakeGateway(name, self.workers)
        self.gateways[gateway.gateway_id] = gateway
        return gateway

    def submit(
        self,
        gateway: FakeGateway,
        prompt: Sequence[int],
        *,
        limits: Limits,
        routes: Sequence[tuple[str, ...]],
        sampling: Sampling | None = None,
        num_top: int | None = None,
    ) -> Ask:
        """Submits a request. Each attempt of the request uses the next route.

        A route names the prefill worker, the decode worker and optionally the holder of a prefix.
        """
        sampling = Sampling() if sampling is None else sampling
        ask = Ask(
            name=f"r{len(self.asks)}",
            prompt=tuple(prompt),
            sampling=sampling,
            limits=limits,
            routes=[Route(*map(WorkerId, route)) for route in routes],
            expected=answer(prompt, sampling, limits),
            num_top=num_top,
        )
        self.asks.append(ask)
        self._learn([*ask.prompt, *ask.expected.token_ids])
        gateway.submit(ask)
        return ask

    def lose(self, gateway: FakeGateway, num_arriving: int) -> None:
        """Kills a gateway; its first `num_arriving` messages to each worker still arrive."""
        gateway.give_up()
        del self.gateways[gateway.gateway_id]
        for worker_id, link in gateway.links.items():
            sent = list(link.to_worker)[:num_arriving]
            link.to_worker = deque([*sent, GatewayLost(gateway.gateway_id)])
            link.to_gateway.clear()
            self._orphans.append((gateway.gateway_id, worker_id, link))

    def unblock(self) -> None:
        """Unblocks all stuck worker parts and connections."""
        for worker in self.workers.values():
            worker.stuck.clear()
        for gateway in self.gateways.values():
            for link in gateway.links.values():
                link.is_stuck = False

    def moves(self) -> list[Move]:
        """Returns all possible next moves, except that time passes."""
        moves: list[Move] = []
        for worker in self.workers.values():
            moves += self._moves_of(worker)
        for gateway in self.gateways.values():
            for worker_id, link in gateway.links.items():
                if link.is_stuck:
                    continue
                if link.to_worker:
                    moves.append((partial(self._arrive, gateway.gateway_id, worker_id, link), None))
                if link.to_gateway:
                    moves.append((partial(gateway.take, worker_id), None))
        for gateway_id, worker_id, link in self._orphans:
            if link.to_worker:
                moves.append((partial(self._arrive, gateway_id, worker_id, link), None))
        for connection in self._connections:
            sink, source = connection.sink, connection.source
            if connection.to_source and "transfer" not in source.worker.stuck:
                moves.append((partial(source.take_from_sink, connection), source.worker))
            if connection.to_sink and "transfer" not in sink.worker.stuck:
                moves.append((partial(sink.take_from_source, connection), sink.worker))
        return moves

    def move(self, rng: random.Random) -> None:
        """Performs a random move and checks the invariants."""
        moves = self.moves()
        if not moves:
            return
        act, worker = rng.choice(moves)
        act()
        if worker is not None:
            worker.validate()

    def drain(self, rng: random.Random, max_rounds: int = 400) -> None:
        """Performs moves in random order until the cluster is at rest."""
        self.unblock()
        for _ in range(max_rounds):
            if self.is_at_rest():
                return
            moves = self.moves()
            for _ in range(4 * len(moves)):
                self.move(rng)
            if self._is_quiet():
                self._check_for_orphans()
            self.now_s += 0.25
            for worker in self.workers.values():
                worker.endpoint.sweep()
        raise AssertionError("the cluster does not come to rest")

    def is_at_rest(self) -> bool:
        """Returns True if every request has an outcome and no worker holds blocks or sequences."""
        return (
            self._is_quiet()
            and all(ask.outcome is not None for ask in self.asks)
            and all(worker.is_at_rest() for worker in self.workers.values())
        )

    def _is_quiet(self) -> bool:
        """Returns True if no message and no step is in flight."""
        links = [link for _, _, link in self._orphans]
        links += [link for gateway in self.gateways.values() for link in gateway.links.values()]
        return not (
            any(link.to_worker or link.to_gateway for link in links)
            or any(c.to_source or c.to_sink for c in self._connections)
            or any(w.inbox or w.endpoint.orders for w in self.workers.values())
            or any(w.in_flight for w in self.workers.values())
        )

    def _check_for_orphans(self) -> None:
        """Asserts, when nothing is in flight, that workers serve and lease only for running
        attempts."""
        wanted = {seq_id for gateway in self.gateways.values() for seq_id in gateway.asks}
        for worker in self.workers.values():
            assert worker.seq_ids() <= wanted, "a sequence goes on that no gateway wants"
            moved = {i.removesuffix(".moved") for i in worker.offers.leases.opened if "moved" in i}
            assert moved <= wanted, "a sequence is handed over for no gateway"
            assert set(worker.prefill.leases.opened) <= wanted, (
                "a lease goes on that no gateway wants"
            )

    def _moves_of(self, worker: FakeWorker) -> list[Move]:
        acts: list[Callable[[], None]] = []
        if "transfer" not in worker.stuck:
            acts.append(worker.endpoint.sweep)
            if worker.endpoint.orders and "orders" not in worker.stuck:
                acts.append(worker.endpoint.take_order)
        if "steps" not in worker.stuck:
            if worker.in_flight:
                acts.append(worker.end_step)
            if len(worker.in_flight) <= worker.shape.overlaps:
                acts.append(worker.begin_step)
                if worker.inbox and "events" not in worker.stuck:
                    acts.append(worker.take_event)
        return [(act, worker) for act in acts]

    def _arrive(self, gateway_id: GatewayId, worker_id: WorkerId, link: Link) -> None:
        """Delivers a gateway's next message, or the end of its session, to a worker."""
        inbox = self.workers[worker_id].inbox
        frame = link.to_worker.popleft()
        if isinstance(frame, GatewayLost):
            inbox.append(frame)
            return
        (message,) = decode_to_worker(frame)
        inbox.append(FromGateway(gateway_id, message))  # type: ignore[arg-type]

    def _learn(self, token_ids: list[int]) -> None:
        """Records the KV of a token sequence's blocks by block hash."""
        kvs = kvs_of(token_ids)
        for i, block_hash in enumerate(hash_blocks(token_ids, BLOCK_SIZE)):
            self.block_contents[block_hash] = kvs[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]

    # ------------------------------------------------------------ transfer network

    def endpoint_at(self, address: str) -> FakeEndpoint:
        return self.workers[WorkerId(address.removeprefix("fake://"))].endpoint

    def send_to_source(self, sink: FakeEndpoint, address: str, message: ToSource) -> None:
        source = self.endpoint_at(address)
        for connection in self._connections:
            if connection.sink is sink and connection.source is source:
                break
        else:
            connection = Connection(b"peer %d" % next(self._peers), sink, source)
            self._connections.append(connection)
        connection.to_source.append(encode(message))

    def send_to_sink(self, peer: bytes, message: ToSink, payload: list[list[Kv]]) -> None:
        for connection in self._connections:
            if connection.peer == peer:
                connection.to_sink.append((encode(message), payload))

    def disconnect(self, sink: FakeEndpoint, address: str) -> None:
        source = self.endpoint_at(address)
        self._connections = [
            c for c in self._connections if not (c.sink is sink and c.source is source)
        ]
