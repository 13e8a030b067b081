"""A store's sessions with the workers from which it pulls blocks, and with other stores.

To a worker, a store looks like a gateway that requests blocks. By each session the store receives
the worker's block events and answers. A link redials until it is cancelled.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

import zmq

from engine.clock import Clock
from engine.errors import ProtocolError
from engine.messages import (
    PROTOCOL_VERSION,
    BlocksOffered,
    Cancel,
    GatewayId,
    Hello,
    LoadReport,
    OfferBlocks,
    Welcome,
    WorkerId,
    decode_to_gateway,
    decode_welcome,
    encode_frame,
)
from engine.net.sessions import SessionClient
from engine.net.trust import Secret
from engine.worker.block_events import BlockEvent
from router.block_feed import BlockFeed
from router.block_news import Apply, EventsMissed

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
SILENCE_S = 5.0  # a peer that sends nothing for this long counts as lost
RETRY_EVERY_S = 0.5
_LINK_ERRORS = (ConnectionError, TimeoutError, ProtocolError, OSError)


class PeerListener(Protocol):
    """Handles the events of a store's sessions. Every method is called on the event loop."""

    def admits(self, info: Welcome) -> bool:
        """Returns True if this store can use the peer's blocks. Called at each handshake."""
        ...

    def joined(self, info: Welcome) -> None:
        """Called at the start of a session."""
        ...

    def lost(self, peer_id: WorkerId) -> None:
        """Called at the end of a session."""
        ...

    def news(self, peer_id: WorkerId, events: Collection[BlockEvent]) -> None:
        """Called with the peer's block events, in order."""
        ...

    def offered(self, peer_id: WorkerId, message: BlocksOffered) -> None:
        """Called with a worker's answer to a request for blocks."""
        ...


class StorePeers:
    """The store's links: one for each address of a peer."""

    def __init__(
        self, name: GatewayId, *, secret: Secret, clock: Clock, listener: PeerListener
    ) -> None:
        """`name` is the name of this store in messages to workers. It is new at each start."""
        self._name = name
        self._secret = secret
        self._clock = clock
        self._listener = listener
        self._tasks: dict[str, asyncio.Task[None]] = {}  # each link's task, by the peer's address
        self._clients: dict[WorkerId, SessionClient] = {}
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def num_open(self) -> int:
        """The number of open sessions."""
        return len(self._clients)

    def follow(self, addresses: Collection[str]) -> None:
        """Replaces the set of peers: opens and closes links."""
        if self._zmq is None:
            self._zmq = zmq.Context()
            self._zmq.set(zmq.MAX_SOCKETS, self._zmq.get(zmq.SOCKET_LIMIT))
        for address in set(self._tasks) - set(addresses):
            self._tasks.pop(address).cancel()
        for address in sorted(set(addresses) - set(self._tasks)):
            self._tasks[address] = asyncio.create_task(self._keep_linked(address))

    def ask(self, peer_id: WorkerId, message: OfferBlocks | Cancel) -> None:
        """Sends a message to a peer.

        Without a session the message is dropped; the wait for its answer has a deadline.
        """
        client = self._clients.get(peer_id)
        if client is None:
            return
        try:
            client.post(encode_frame([message]))
        except ConnectionError as error:
            log.info("%s did not get a message: %s", peer_id, error)

    async def close(self) -> None:
        """Ends all sessions."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    async def _keep_linked(self, address: str) -> None:
        never = asyncio.get_running_loop().create_future()
        last_reason = ""
        while True:
            client = SessionClient(address, self._secret, silence_s=SILENCE_S)
            try:
                await client.open()
                await self._run(client)
            except _LINK_ERRORS as error:
                reason = str(error) or type(error).__name__
                level = logging.INFO if reason != last_reason else logging.DEBUG
                log.log(level, "peer at %s: %s; trying again", address, reason)
                last_reason = reason
            finally:
                await client.close()
            await asyncio.wait([never], timeout=RETRY_EVERY_S)

    async def _run(self, client: SessionClient) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await client.send(encode_frame([Hello(PROTOCOL_VERSION, self._name)]))
            info = decode_welcome(await client.receive())
        if not self._listener.admits(info):
            raise ProtocolError(f"the blocks of {info.worker_id} are of another kind")
        if info.events is None or info.worker_id in self._clients:
            raise ProtocolError(f"{info.worker_id} does not publish its blocks, or is here already")
        assert self._zmq is not None
        self._clients[info.worker_id] = client
        feed = BlockFeed(
            info,
            info.events,
            secret=self._secret,
            clock=self._clock,
            on_news=lambda news: self._take_news(info.worker_id, news),
            count=lambda _: None,
        )
        self._listener.joined(info)
        try:
            feed.open(self._zmq)
            while (frame := await client.receive()) is not None:
                for message in decode_to_gateway(frame):
                    match message:
                        case BlocksOffered():
                            self._listener.offered(info.worker_id, message)
                        case LoadReport():
                            feed.counted(message.num_event_batches)
        finally:
            feed.close()
            del self._clients[info.worker_id]
            self._listener.lost(info.worker_id)

    def _take_news(self, peer_id: WorkerId, news: Apply | EventsMissed) -> None:
        if isinstance(news, Apply):
            self._listener.news(peer_id, news.events)
