"""The front's end of the channel to the ranks. Knows nothing of processes or of what the messages mean."""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from hocket.channel.messages import KEY_MARK, RankMessage, ToRank, decode_for_front, encode
from hocket.errors import RankLost


class FrontChannel:
    """A ROUTER socket; ranks are addressed by number once they have said hello.

    `bind_to`: an `ipc://` path in a private folder, or `tcp://host:*` (any free port). Over TCP the socket is encrypted
    and only who knows its public key can speak to it; `self.address` is what a rank needs to connect, key included.
    """

    def __init__(self, bind_to: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to nobody is an error, not lost
        key = ""
        if bind_to.startswith("tcp://"):
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            key = KEY_MARK + public.decode()
        self._socket.bind(bind_to)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT) + key

    def send(self, ranks: Iterable[int], message: ToRank) -> None:
        """Send one message to several ranks (encoded once). Raises RankLost for one that is not connected."""
        raw = encode(message)
        for rank in ranks:
            try:
                self._socket.send_multipart((str(rank).encode(), raw))
            except zmq.ZMQError as error:
                raise RankLost(f"rank {rank} cannot be reached: {error}") from None

    def receive(self, timeout_s: float) -> list[RankMessage]:
        """Every message that has arrived; waits up to `timeout_s` for the first."""
        messages: list[RankMessage] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return messages
        while True:
            try:
                messages.append(decode_for_front(self._socket.recv_multipart(zmq.NOBLOCK)[1]))
            except zmq.Again:
                return messages

    def fileno(self) -> int:
        """A descriptor that an event loop may watch: it becomes readable when messages *may* have come since `receive`
        was last called. Sending may take that sign away: ask `has_messages` afterwards."""
        return int(self._socket.getsockopt(zmq.FD))

    def has_messages(self) -> bool:
        """Whether `receive` would find something now."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Send what is queued (for up to 0.2 s) and close."""
        self._context.destroy(linger=200)
