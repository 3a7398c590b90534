"""Where the commands of other hosts find the server: who has which ranks, and when one ends. Knows no processes.

TCP, encrypted with a key that both ends make from a secret (HOCKET_CLUSTER_SECRET), so that nobody without it can say a
word; typed msgpack, nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from hocket.channel.messages import Failed, NeedWake, Wake
from hocket.envs import CLUSTER_SECRET
from hocket.errors import RankLost

logger = logging.getLogger(__name__)
_HEARTBEAT_MS = 2000
_MAX_BYTES = 1 << 20
_LINGER_MS = 500


class FromHost(msgspec.Struct, tag=True):
    """Base of what a headless host says."""


class Join(FromHost):
    """It has these ranks. must_agree: what all hosts were given alike."""

    host: str
    start_rank: int
    num_ranks: int
    world_size: int
    must_agree: dict[str, Any]


class Alive(FromHost):
    """Its command runs."""


class RankEnded(FromHost):
    """A rank's process ended before it was told to."""

    rank: int
    how: str


class RanksReady(FromHost):
    """It has a server of its own, whose ranks are ready."""


class Drained(FromHost):
    """Its server answers nobody any more."""


class Left(FromHost):
    """Its server ends though it was not all servers' end; the error and its class."""

    kind: str
    error: str


class Leaving(msgspec.Struct, tag=True):
    """In either direction: a server was told to end, so all of them finish what they do. who: for people."""

    who: str


class ToHost(msgspec.Struct, tag=True):
    """Base of what the server says."""


class Waiting(ToHost):
    """Heard; these ranks are missing still."""

    missing: list[int]


class Refused(ToHost):
    """Not with these ranks or options."""

    message: str


class Start(ToHost):
    """All hosts are there: start the ranks. `channel`: the front's address, with its key; and the group's store."""

    channel: str
    store_host: str
    store_port: int


class AllReady(ToHost):
    """So are the ranks of all hosts."""


class End(ToHost):
    """It is over; error: why, "" where the server ended as it should; kind: its class."""

    error: str
    kind: str = RankLost.__name__


HostMessage = Join | Alive | RankEnded | RanksReady | Drained | Left | Leaving | NeedWake | Failed
ServerMessage = Waiting | Refused | Start | AllReady | End | Leaving | Wake
_encode = msgspec.msgpack.Encoder().encode
_from_host = msgspec.msgpack.Decoder(HostMessage)
_from_server = msgspec.msgpack.Decoder(ServerMessage)


def _server_keys() -> tuple[bytes, bytes]:
    """Public and secret key of the lobby, both from the shared secret."""
    raw = hashlib.blake2b(CLUSTER_SECRET.get().encode(), digest_size=32, person=b"hocket lobby").digest()
    secret = z85.encode(raw)
    return zmq.curve_public(secret), secret


class Lobby:
    """The server's end, at `tcp://address:port`. Hosts are known by a name that each made up for itself.

    Raises zmq.ZMQError where the address is not of this host or the port is taken.
    """

    def __init__(self, address: str, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, _server_keys()[1])
        try:
            self._socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, to: bytes, message: ServerMessage) -> None:
        """To one host; to one that has gone nothing is sent."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart((to, _encode(message)), zmq.NOBLOCK)

    def fileno(self) -> int:
        """As FrontChannel.fileno."""
        return int(self._socket.getsockopt(zmq.FD))

    def has_messages(self) -> bool:
        """Whether `receive` would find something now."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[bytes, HostMessage]]:
        """What has arrived, and from whom; waits up to `timeout_s` for the first. What is no message is left out."""
        found: list[tuple[bytes, HostMessage]] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return found
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            try:
                found.append((parts[0], _from_host.decode(parts[1])))
            except (IndexError, msgspec.DecodeError) as error:
                logger.warning("another host sent what is no message: %s", error)

    def close(self) -> None:
        """Send what is queued, for a moment, and close."""
        self._context.destroy(linger=_LINGER_MS)


class LobbyGuest:
    """A headless host's end. `wrong_key`: the server has another secret."""

    def __init__(self, address: str, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        options: dict[int, int | bytes] = {
            zmq.IDENTITY: secrets.token_hex(8).encode(),
            zmq.CURVE_SERVERKEY: _server_keys()[0],
            zmq.CURVE_PUBLICKEY: public,
            zmq.CURVE_SECRETKEY: secret,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: 5 * _HEARTBEAT_MS,
            zmq.MAXMSGSIZE: _MAX_BYTES,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.wrong_key, self._is_connected = False, False
        self._socket.connect(f"tcp://{address}:{port}")

    def send(self, message: HostMessage) -> None:
        self._socket.send(_encode(message))

    def fileno(self) -> int:
        """As FrontChannel.fileno."""
        return int(self._socket.getsockopt(zmq.FD))

    def has_messages(self) -> bool:
        """Whether `receive` would find something now."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[ServerMessage]:
        """What has arrived; waits up to `timeout_s` for the first.

        Raises:
            RankLost: the server was there and is gone.
        """
        found: list[ServerMessage] = []
        self._socket.poll(int(timeout_s * 1000))
        while True:
            try:
                found.append(_from_server.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        if not found:
            self._look_at_connection()
        return found

    def _look_at_connection(self) -> None:
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected, self.wrong_key = True, False
            elif self._is_connected:
                self._is_connected = False
                raise RankLost("the server's host went away")
            else:  # hung up on before a word was said
                self.wrong_key = True

    def close(self) -> None:
        """Send what is queued, for a moment, and close."""
        self._socket.disable_monitor()
        self._context.destroy(linger=_LINGER_MS)
