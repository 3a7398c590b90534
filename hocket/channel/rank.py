"""A rank's end of the channel to the front. Knows nothing of what an engine does with the messages."""

from __future__ import annotations

import zmq

from hocket.channel.messages import KEY_MARK, FromRank, FrontMessage, decode_for_rank, encode
from hocket.errors import RankLost


class RankChannel:
    """A DEALER socket whose identity is the rank."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._rank = rank
        self._context = zmq.Context()
        self._socket = self._connected(self._context, str(rank))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]], identity: str) -> zmq.Socket[bytes]:
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.IDENTITY, identity.encode())
        made.setsockopt(zmq.LINGER, 1000)
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        endpoint, _, server_key = self._address.partition(KEY_MARK)
        if server_key:
            public, secret = zmq.curve_keypair()
            made.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            made.setsockopt(zmq.CURVE_PUBLICKEY, public)
            made.setsockopt(zmq.CURVE_SECRETKEY, secret)
        made.connect(endpoint)
        return made

    def send(self, message: FromRank) -> None:
        self._socket.send(encode(message))

    def send_from_other_thread(self, message: FromRank) -> None:
        """Over a connection of its own, since a socket is for one thread. Waits up to a second until it is sent."""
        context = zmq.Context()
        self._connected(context, f"{self._rank} besides").send(encode(message))
        context.destroy(linger=1000)

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
