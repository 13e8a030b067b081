"""Passes the tokens of all streams to C++ in one call per iteration of the event loop.

Each step of a worker yields a token for each of its streams. Most streams need only the text of a
token. The tokens of these streams are collected. At the end of the iteration C++ makes the chunks
of all responses at once and sends them (`router.text.native`). If a socket does not accept all
bytes, the transport sends the remaining bytes. Tokens that Python handles must be sent after the
remaining bytes: see `TextBatch.release`.

Once a stream has started, its tokens do not need Python at all: C++ reads the tokens from the
worker's frame, and sends the chunks while it parses the frame. C++ stops reading a stream's tokens
before Python sends anything to the client, and when the client's socket is full.
"""

import asyncio
import ctypes
import logging
from array import array
from collections.abc import Sequence
from contextvars import Context
from itertools import chain

from engine.messages import SeqId
from engine.native.library import library
from router.edge.exchange import NO_SOCKET, BodyPipe
from router.gateway.metrics.meters import GatewayMetrics
from router.port import Handle
from router.text.native import NativeText, TakenFrame

log = logging.getLogger(__name__)

REST = 3  # numbers per unsent rest in C++'s result: index, start and end of the rest


class FastPath:
    """One choice whose tokens C++ converts to text and sends to the client."""

    __slots__ = ("batch", "number", "pipe", "seq_id", "text")

    def __init__(self, batch: "TextBatch", text: NativeText, pipe: BodyPipe) -> None:
        self.batch = batch
        self.text = text
        self.pipe = pipe
        self.number = 0  # number of the stream in C++
        self.seq_id: SeqId | None = None  # the sequence whose tokens are read from frames


class TextBatch:
    """The tokens collected in one iteration of an event loop; implements
    `router.port.FrameTaker`.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        """Raises BuildError if the C++ library is missing."""
        self._metrics = metrics
        self._library = library()
        self._handle: int = self._library.baton_text_open()
        self._frame = TakenFrame()
        self._added: list[tuple[FastPath, Sequence[int], float]] = []
        self._by_seq: dict[SeqId, FastPath] = {}  # paths whose tokens are read from frames
        self._by_number: dict[int, FastPath] = {}
        self._num_opened = 0

    def __del__(self) -> None:
        self._library.baton_text_close(self._handle)

    def add(
        self, path: FastPath, token_ids: Sequence[int], now_s: float, handle: Handle | None
    ) -> None:
        """Adds tokens of a path. Their text is sent at the end of the event loop's iteration.

        If `handle` is the request's handle, C++ reads later tokens from frames where possible. Then
        no other choice may write to the same client.
        """
        if not self._added:
            asyncio.get_running_loop().call_soon(self.flush, context=Context())
        self._added.append((path, token_ids, now_s))
        if handle is None:
            return
        seq_id = handle.offer_frames(self)
        if path.seq_id is not None and path.seq_id != seq_id:
            self.close(path.seq_id)
        if seq_id is not None and path.seq_id is None:
            self.open(seq_id, path)

    def open(self, seq_id: SeqId, path: FastPath) -> None:
        """Starts to read the tokens of a sequence from frames, if the client's socket allows it."""
        socket, name, text = path.pipe.socket(), seq_id.encode(), ctypes.addressof(path.text)
        number = self._num_opened = self._num_opened + 1
        if socket == NO_SOCKET or not self._library.baton_text_stream_open(
            self._handle, name, len(name), text, socket, number
        ):
            return
        path.number, path.seq_id = number, seq_id
        self._by_number[number] = self._by_seq[seq_id] = path

    def close(self, seq_id: SeqId) -> None:
        """Stops reading the tokens of this sequence from frames."""
        path = self._by_seq.pop(seq_id, None)
        if path is not None:
            name = seq_id.encode()
            self._library.baton_text_stream_close(self._handle, name, len(name))
            del self._by_number[path.number]
            path.seq_id = None

    def release(self, path: FastPath) -> None:
        """Sends all added tokens, and stops reading the path's tokens from frames.

        Must be called before the choice is changed in any other way.
        """
        self.flush()
        if path.seq_id is not None:
            self.close(path.seq_id)

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Sends a frame's tokens of known paths, and returns the positions of all other messages.

        Returns None if the frame has no tokens of a known path.
        """
        if not self._by_seq:
            return None
        self.flush()  # tokens that arrived before this frame
        taken = self._frame
        if not self._library.baton_text_frame(
            self._handle, frame, len(frame), now_s, ctypes.byref(taken)
        ):
            return None
        self._metrics.num_generation_tokens += taken.num_tokens
        self._metrics.num_batched_tokens += taken.num_tokens
        if taken.num_rests:
            self._send_rests(taken.rests[: REST * taken.num_rests], taken.out, self._by_number)
        if taken.num_taken == taken.num_messages:
            return ()
        return [i for i in range(taken.num_messages) if taken.taken[i] is None]

    def flush(self) -> None:
        """Converts all added tokens to text and sends the text now."""
        if not self._added:
            return
        added, self._added = self._added, []
        self.send(added)

    def send(self, added: Sequence[tuple[FastPath, Sequence[int], float]]) -> None:
        """Converts tokens of several paths to text and sends the text.

        `added` also has the time at which the tokens arrived.

        Tokens that complete no text produce no chunk.
        """
        paths, token_ids, times_s = zip(*added, strict=True)
        paths[0].pipe.flush()  # sends parts of response bodies that were written before
        try:
            sockets = array("i", [path.pipe.socket() for path in paths])
            addresses = array("Q", [ctypes.addressof(path.text) for path in paths])
            lengths, times = array("q", map(len, token_ids)), array("d", times_s)
            ids = array("q", chain.from_iterable(token_ids))
            rests, out = array("q", bytes(8 * REST * len(paths))), ctypes.c_void_p()
            num_rests = self._library.baton_text_step(
                self._handle,
                addresses.buffer_info()[0],
                lengths.buffer_info()[0],
                times.buffer_info()[0],
                len(paths),
                ids.buffer_info()[0],
                sockets.buffer_info()[0],
                rests.buffer_info()[0],
                ctypes.byref(out),
            )
        except Exception:  # a bug in Baton: answers without these tokens would be wrong
            log.exception("tokens became no text: the connections of their streams are cut")
            for path in paths:
                path.pipe.cut()
            return
        self._metrics.num_generation_tokens += len(ids)
        self._metrics.num_batched_tokens += len(ids)
        if num_rests:
            self._send_rests(rests[: REST * num_rests], out.value, paths)

    def _send_rests(
        self,
        rests: Sequence[int],
        out: int | None,
        paths: "Sequence[FastPath] | dict[int, FastPath]",
    ) -> None:
        """Passes bytes that sockets did not accept to the transports.

        C++ stops sending for these streams, as later chunks must not overtake the bytes.
        """
        assert out is not None
        numbers, begins, ends = rests[::REST], rests[1::REST], rests[2::REST]
        found = [
            (paths[number], ctypes.string_at(out + begin, end - begin))
            for number, begin, end in zip(numbers, begins, ends, strict=True)
        ]
        for path, data in found:
            path.pipe.write_coded(data)
            if path.seq_id is not None:
                self.close(path.seq_id)
