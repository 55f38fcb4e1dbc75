"""Starts servers for llama.cpp's suite by fork: hundreds of its cases start one each, and imports would be most of their time.

The runner starts this once. `llama-server` sends its arguments and its stdout and stderr over the socket FASTLLM_ZYGOTE, gets the
server's pid, and later its exit code. The preparation processes of a server come from a fork that was made before it had threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

__all__ = ["receive", "send", "serve_forever"]


def send(stream: socket.socket, data: Any, fds: list[int] | None = None) -> None:
    """One message, with file descriptors."""
    socket.send_fds(stream, [json.dumps(data).encode() + b"\n"], fds or [])


def receive(stream: socket.socket) -> tuple[Any, list[int]]:
    """One message; None at the end."""
    raw, fds, _, _ = socket.recv_fds(stream, 1 << 20, 4)
    while raw and not raw.endswith(b"\n"):
        raw += stream.recv(1 << 20)
    return (json.loads(raw) if raw else None), fds


class Prepared:
    """What the pool takes for a subprocess: a preparation process that somebody else has forked."""

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        """None while it lives."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def kill(self) -> None:
        """Ends it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The helper collects it."""
        return 0


def helper(control: socket.socket) -> None:
    """Forks a preparation process for each message, until the server is gone."""
    from fastllm.server import preparer

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds = receive(control)
        if message is None:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            sys.argv = ["preparer", str(fds[0])]
            preparer.main()
            os._exit(0)
        os.close(fds[0])
        send(control, pid)


def server(arguments: list[str]) -> None:
    """The process that becomes a server."""
    from fastllm.server import pool

    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        helper(theirs)
    theirs.close()

    class Instead:
        """In the place of the module subprocess."""

        DEVNULL = -3

        @staticmethod
        def Popen(command: list[str], *, pass_fds: list[int], **more: Any) -> Prepared:
            send(ours, command[-1], list(pass_fds))
            return Prepared(receive(ours)[0])

    pool.subprocess = Instead  # type: ignore[assignment]
    import llama_server

    code = 1
    try:
        code = llama_server.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def attend(stream: socket.socket) -> None:
    """One server from its start to its end: in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, fds = receive(stream)
    pid = os.fork()
    if pid == 0:
        stream.close()
        for number, fd in enumerate(fds, 1):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(message["folder"])
        server(message["arguments"])
    for fd in fds:
        os.close(fd)
    send(stream, pid)
    ends = os.pidfd_open(pid)
    ready, _, _ = select.select([ends, stream], [], [])
    if stream in ready:  # whoever asked for it was killed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if ends in ready:
        send(stream, os.waitstatus_to_exitcode(status))
    os._exit(0)


def serve_forever(path: str) -> None:
    """Until it is killed."""
    import llama_server  # noqa: F401
    import native  # noqa: F401
    import uvicorn  # noqa: F401

    import fastllm.backends.cpu_avx.plugin
    import fastllm.cli.main
    import fastllm.cli.server
    import fastllm.formats
    import fastllm.loading
    import fastllm.server.kinds
    import fastllm.server.preparer
    import fastllm.server.serve  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            stream, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                attend(stream)
            stream.close()


if __name__ == "__main__":
    serve_forever(sys.argv[1])
