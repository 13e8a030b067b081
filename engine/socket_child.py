"""Starts a Python process that communicates with its parent over a socket pair.

The child inherits its end of the pair. The number of this file descriptor is the last argument of
the child's command line. The child's standard input and output are /dev/null, so that it cannot
disturb the parent's input and output. When either process exits, the other process reads the end of
the stream.
"""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack


def start_with_socket(
    arguments: Sequence[str],
    *,
    socket_type: socket.SocketKind = socket.SOCK_STREAM,
    environment: Mapping[str, str] | None = None,
    new_session: bool = False,
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Runs Python with these arguments. Returns the process and the parent's end of the socket
    pair.

    Without `environment`, the child inherits the parent's environment. Raises OSError if the
    process cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket_type)
    with theirs, ExitStack() as stack:
        stack.enter_context(ours)
        process = subprocess.Popen(
            [sys.executable, *arguments, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=new_session,
        )
        stack.pop_all()
    return process, ours
