"""A rank's end of the channel to the front. Knows nothing of what an engine does with the messages."""

from __future__ import annotations

import zmq

from hocket.channel.messages import KEY_MARK, FromRank, FrontMessage, decode_for_rank, encode
from hocket.errors import RankLost


class RankChannel:
    """A DEALER socket whose identity is the rank."""

    def __init__(self, address: str, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        endpoint, _, server_key = address.partition(KEY_MARK)
        if server_key:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)

    def send(self, message: FromRank) -> None:
        self._socket.send(encode(message))

    def receive(self, *, block: bool) -> list[FrontMessage]:
        """Every message that has arrived; with `block` waits for at least one.

        Raises:
            RankLost: the front went away while this rank waited for it.
        """
        messages: list[FrontMessage] = []
        if block:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            ready = dict(poller.poll())
            if self._socket not in ready:
                raise RankLost("the front went away")
        while True:
            try:
                messages.append(decode_for_rank(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Send what is queued (for up to a second) and close."""
        self._socket.disable_monitor()
        self._context.destroy(linger=1000)
