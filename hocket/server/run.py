"""Runs the server: start-up, signals, the end. Knows no endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from hocket.config.hosts import HostConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist.headless import run_ranks, say
from hocket.dist.launcher import under_torchrun
from hocket.errors import ConfigError, HocketError, RankLost
from hocket.front import must_agree
from hocket.llm import LLM
from hocket.server.app import make_app
from hocket.server.connection import TimedProtocol
from hocket.server.served_model import ServedModel
from hocket.server.settings import Settings
from hocket.server.starting import Starting
from hocket.startup import process_began

logger = logging.getLogger(__name__)
LAST_WORDS_S = 3.0
"""How long a server without ranks still tells why, before it ends."""
_AFTER_DRAIN_S = 5
_BACKLOG = 2048


def serve(options: Options, settings: Settings, hosts: HostConfig | None = None) -> None:
    """Load the model and serve it until SIGTERM or SIGINT, then finish what is being answered.

    hosts: other hosts have some of the ranks, for this server or each for one of its own; or this one is headless and
    only runs its ranks for the server. Under torchrun rank 0 serves and the other ranks end in here.

    Raises:
        HocketError: options are wrong, the model cannot be loaded, or a rank was lost for good.
        KeyboardInterrupt: a second signal came while requests were being finished.
    """
    restarts = settings.on_rank_loss == "restart"
    if hosts is not None and hosts.headless:
        _serve_headless(options, hosts, restarts=restarts)
        return
    if under_torchrun():
        _check_torchrun(hosts, restarts=restarts)
        if os.environ["RANK"] != "0":
            # torchrun tells all its processes to end: rank 0 decides when, and the others end with it.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            LLM.from_options(options)  # does not return
    _allow_many_connections()
    with _listen(settings) as listener, _started(options, settings, listener, hosts) as llm:
        if not logging.getLogger("hocket").isEnabledFor(logging.INFO):  # the log has it then
            say(llm.summary())
        asyncio.run(_Run(options, settings, listener).serve(llm))


def _serve_headless(options: Options, hosts: HostConfig, *, restarts: bool) -> None:
    startup_timeout_s = resolve(options, num_local=hosts.num_ranks).startup_timeout_s
    while True:
        try:
            run_ranks(hosts, must_agree(options, hosts), startup_timeout_s)
            return
        except RankLost as error:
            if not restarts:
                raise
            say(f"RankLost: {error}; waiting for the server to start anew")


def _check_torchrun(hosts: HostConfig | None, *, restarts: bool) -> None:
    if hosts is not None:
        field, value = "data_parallel_size_local", hosts.num_ranks
        if hosts.own_server:
            field, value = "data_parallel_rank", hosts.start_rank
        allowed = "not to give it: torchrun says which ranks are where, and rank 0 serves for all"
        raise ConfigError(field, value, allowed, where="under torchrun")
    if restarts:
        raise ConfigError("on_rank_loss", "restart", "exit, and torchrun's --max-restarts", where="under torchrun")


def _started(options: Options, settings: Settings, listener: socket.socket, hosts: HostConfig | None) -> LLM:
    """The LLM; until it is there, whoever asks is told what is waited for."""
    with Starting(settings, listener, _config) as starting:
        return LLM.from_options(options, progress=True, hosts=hosts, on_wait=starting.tell)


class _Run:
    """One server's life on the loop."""

    def __init__(self, options: Options, settings: Settings, listener: socket.socket) -> None:
        self._options = options
        self._settings = settings
        self._listener = listener
        self._failure: HocketError | None = None
        self._num_signals = 0
        self._is_draining = False

    async def serve(self, llm: LLM) -> None:
        self._loop = asyncio.get_running_loop()
        self._served = ServedModel(
            llm,
            self._options,
            restart=self._settings.on_rank_loss == "restart",
            on_end=self._model_ended,
            on_leaving=self._other_leaves,
            prefix_affinity=self._settings.prefix_affinity,
        )
        self._server = _Server(_config(make_app(self._served, self._settings), self._settings), self._started)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        try:
            await self._server.serve([self._listener])
            await self._served.wait_for_others(lambda: self._num_signals > 1)
        finally:
            self._served.close()
        if self._failure is not None:
            raise self._failure
        if self._num_signals > 1:
            raise KeyboardInterrupt

    def _started(self) -> None:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._settings.ssl_certfile else "http"
        place = f"[{host}]" if ":" in host else host
        keys = "an API key is needed" if self._settings.api_keys else "no API key"
        say(self._served.llm.startup.line(process_began(), time.perf_counter()))
        say(f"serving at {scheme}://{place}:{port} ({keys}); Ctrl-C ends")

    def _other_leaves(self, who: str) -> None:
        self._loop.call_soon(self._drain, f"{who} ends")  # the server may not be there yet

    def _signalled(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._server.force_exit = True
            self._served.client.fail_all(HocketError("the server was stopped"))
            return
        self._served.leave()
        self._drain(signal.Signals(number).name)

    def _drain(self, why: str) -> None:
        """Take no new connections; let what is being answered end, for a while."""
        if self._is_draining:
            return
        self._is_draining = True
        limit_s = self._settings.drain_timeout_s
        num_requests = self._served.client.num_requests
        say(f"{why}: finishing {num_requests} requests, for up to {limit_s:g} s; once more: ends at once")
        self._served.drain()
        self._server.should_exit = True
        error = HocketError(f"the server is shutting down: the request did not end within {limit_s:g} s")
        self._loop.call_later(limit_s, self._served.client.fail_all, error)

    def _model_ended(self, error: HocketError) -> None:
        self._failure = error
        self._loop.call_later(LAST_WORDS_S, self._stop)

    def _stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Any, settings: Settings) -> uvicorn.Config:
    protocol: Any = partial(TimedProtocol, limits=settings)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=logger.isEnabledFor(logging.INFO),
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(settings.drain_timeout_s) + _AFTER_DRAIN_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
    )


def _listen(settings: Settings) -> socket.socket:
    """The bound socket: a port that is taken is said before a model is loaded."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError("host", settings.host, f"an address or name of this host ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", settings.host, f"an address or name of this host ({error.strerror})") from None
        where = f"on {settings.host}: {error.strerror}"
        raise ConfigError("port", settings.port, "a port that is free, 0 for any", where=where) from None
    return listener


def _allow_many_connections() -> None:
    """As many open files as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
