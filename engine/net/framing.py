"""Frames in a stream of bytes: four bytes with the length of a frame, then the frame.

An empty frame is a *beat*: it shows that the sender is alive. The *farewell* is a length that no
frame has; it means that the sender ends the session. So if a stream ends without a farewell, the
other end has failed.

Pure: bytes in, frames out.
"""

import struct

from engine.errors import ProtocolError
from engine.messages import MAX_FRAME_BYTES

_LENGTH = struct.Struct("<I")
HEAD_BYTES = _LENGTH.size
_FAREWELL = 0xFFFF_FFFF
BEAT = b""
FAREWELL = _LENGTH.pack(_FAREWELL)


def head_of(frame: bytes) -> bytes:
    """Returns the four bytes that precede a frame. Raises ProtocolError if the frame is too
    long.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is too long")
    return _LENGTH.pack(len(frame))


class FrameReader:
    """Reassembles frames from pieces of a stream.

    It stores at most one incomplete frame. After the farewell it ignores everything.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted_bytes = HEAD_BYTES  # number of bytes that `_rest` needs for the next frame
        self.has_ended = False

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the frames that are now complete. Raises ProtocolError if a frame is too long."""
        if self.has_ended:
            return []
        if not self._rest:
            return self._frames_of(data)  # usually all frames are complete
        self._rest += data
        if len(self._rest) < self._wanted_bytes:
            return []
        whole, self._rest = self._rest, bytearray()
        return self._frames_of(whole)

    def _frames_of(self, data: bytes | bytearray) -> list[bytes]:
        """Splits complete frames off the beginning of `data`, and stores the rest."""
        frames: list[bytes] = []
        at, view = 0, memoryview(data)
        self._wanted_bytes = HEAD_BYTES
        while len(data) - at >= HEAD_BYTES:
            (length,) = _LENGTH.unpack_from(data, at)
            if length == _FAREWELL:
                self.has_ended = True
                return frames
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is too long")
            end = at + HEAD_BYTES + length
            if end > len(data):
                self._wanted_bytes = end - at
                break
            frames.append(bytes(view[at + HEAD_BYTES : end]))
            at = end
        self._rest += view[at:]
        return frames
