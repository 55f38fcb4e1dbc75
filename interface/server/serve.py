"""Running a server: sockets, signals, uvicorn, and the model that loads beside.

Sockets are opened first, so that a port in use is said before a model is loaded for a minute; requests are answered (503) while it
loads. Called by `fastllm server`, and by tests in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from ..core.errors import UsageError
from .app import make_app
from .gate import MAX_HEADER
from .protocol import protocol_for
from .runtime import Runtime
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..core.sampling import SamplingParams
    from ..loading import LoadedModel
    from .tls import Tls

__all__ = ["is_loopback", "open_sockets", "serve", "shown_address"]

BACKLOG: Final = 2048
SEND_BUFFER: Final = 256 << 10  # of a connection, in the kernel: what a client that does not read may hold besides our own buffer


def is_loopback(host: str, port: int) -> bool:
    """Whether every address of a host is this machine's own. Raises UsageError for a name without address."""
    import ipaddress

    return all(ipaddress.ip_address(a[4][0].partition("%")[0]).is_loopback for a in _addresses(host, port))


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # of the codec for names: a label that is empty or too long, a character that none has
        raise UsageError(f"--host {host[:80]}: this is no name of a host", fix="--host 127.0.0.1") from None
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}", fix="--host 127.0.0.1") from None


def open_sockets(hosts: Sequence[str], port: int, uds: str | None) -> list[socket.socket]:
    """Listening sockets. port 0: one that is free, the same for all hosts. Raises UsageError for what is in use or not ours."""
    opened: list[socket.socket] = []
    try:
        if uds is not None:
            opened.append(_open_uds(uds))
        for host in hosts:
            for family, kind, number, _, address in _addresses(host, port):
                made = socket.socket(family, kind, number)
                opened.append(made)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    made.bind((address[0], port, *address[2:]))
                except OSError as error:
                    fix = "--host 127.0.0.1, or another address of this machine"
                    if error.errno != errno.EADDRNOTAVAIL and port:
                        fix = "--port 8080, or 0 to have one picked" if error.errno == errno.EACCES else "--port 0 picks a free one"
                    raise UsageError(f"{host}:{port} cannot be used: {error.strerror}", fix=fix) from None
                made.listen(BACKLOG)
                port = made.getsockname()[1]
    except BaseException:
        for made in opened:
            made.close()
        raise
    return opened


def _open_uds(path: str) -> socket.socket:
    """A Unix socket; one that nobody listens at any more is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise UsageError(f"--uds {path}: there is a file of that name that is no socket", fix="name another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise UsageError(f"--uds {path}: another server listens there", fix="name another path")
            os.unlink(path)
        made.bind(path)
        os.chmod(path, 0o660)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise UsageError(f"--uds {path}: {error.strerror}", fix="name a path in a folder that may be written") from None
    except BaseException:
        made.close()
        raise
    return made


def shown_address(made: socket.socket, tls: bool = False) -> str:
    """Where clients find a socket."""
    name = made.getsockname()
    if made.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if made.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: draining comes before the sockets are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none."""
        yield


async def serve(
    settings: ServerSettings,
    sockets: list[socket.socket],
    load: Callable[[], LoadedModel],
    *,
    ready: Callable[[Runtime], None] = lambda runtime: None,
    read_keys: Callable[[], Sequence[str]] | None = None,
    defaults: SamplingParams | None = None,
    signals: bool = True,
    tls: Tls | None = None,
) -> int:
    """Serves until `Runtime.stop` or a signal; returns the exit code.

    load: makes the model, in a thread; it is closed here at the end. ready: called when requests are taken. read_keys: the keys anew,
    at SIGHUP. tls: for HTTPS; read anew at SIGHUP as well. Raises what `load` raises.
    """
    loop = asyncio.get_running_loop()
    runtime = Runtime(settings, defaults=defaults)
    gate = runtime.gate = make_app(runtime)
    protocol = protocol_for(runtime)
    config = uvicorn.Config(
        gate,
        http=protocol if tls is None else tls.shake(protocol),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=MAX_HEADER,
    )
    config.load()
    server = _Uvicorn(config)
    runtime.connections = lambda: len(server.server_state.connections) + (0 if tls is None else len(tls.waiting))

    def stop() -> None:
        server.should_exit = True
        if tls is not None:
            tls.abort()

    runtime.stop = stop
    tasks: set[asyncio.Task[None]] = set()
    paths = [made.getsockname() for made in sockets if made.family == socket.AF_UNIX]

    def leave(number: int) -> None:
        if runtime.draining or runtime.loaded is None:  # a second signal, or nothing that could be drained
            remove(paths)
            os._exit(1 if runtime.active else 0)
        tasks.add(asyncio.create_task(runtime.drain()))

    def reread() -> None:
        if tls is not None:
            try:
                tls.read()
                runtime.log.event("certificate", read="again")
            except UsageError as error:
                runtime.log.event("certificate", error=str(error))
        if read_keys is not None:
            try:
                gate.set_keys(read_keys())
                runtime.log.event("keys", read="again")
            except Exception as error:
                runtime.log.event("keys", error=str(error))

    def take_signals() -> None:
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, leave, number)
            loop.add_signal_handler(signal.SIGHUP, reread)

    take_signals()
    serving = asyncio.create_task(server.serve(sockets))
    loaded: LoadedModel | None = None
    try:
        loading = asyncio.create_task(asyncio.to_thread(load))
        await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        loaded = await loading
        take_signals()  # again: a driver may have taken them natively, and in the thread that loads nobody could put them back
        await runtime.attach(loaded)
        if signals:  # the process is the server's: what has been loaded stays, and is not to be looked through for garbage again and again
            gc.collect()
            gc.freeze()
        ready(runtime)
        await serving
        return runtime.exit_code
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        remove(paths)
        await runtime.close()
        for task in tasks:
            task.cancel()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
        if loaded is not None:
            await asyncio.to_thread(loaded.close)


def remove(paths: Sequence[str]) -> None:
    """Takes Unix sockets out of the file system."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
