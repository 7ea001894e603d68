"""One end of a link between two members of the Raft group, without its socket: bytes in, payloads out.

A frame is a length and that many bytes. The initiator says hello with a random nonce, the acceptor answers with its
own. Two keys, one for each direction, follow from the cluster's secret and both nonces; every later frame is sealed
with AES-GCM, whose nonce is a counter. Each side then names itself, whom it means and the members it knows. A frame
that does not open ends the link: a stranger, a replayed or reordered frame and a damaged one look alike.

Before the other side is known its frames are limited to `GREETING_BYTES_MAX`, so strangers cost next to no memory.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterable

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from zmqueue.errors import BadFrame
from zmqueue.model import KiB

FRAME_BYTES_MAX = 512 * KiB
GREETING_BYTES_MAX = 1 * KiB

_HELLO = b"ZMQRAFT1"
_NONCE_BYTES = 32
_LENGTH = struct.Struct("!I")


class _Cipher:
    """Seals or opens one direction of one link. The counter is the nonce, so a key never sees one twice."""

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        self._aead = AESGCM(hmac.digest(secret, b"zmqueue raft " + direction + nonces, "sha256"))
        self._count = 0

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")

    def seal(self, payload: bytes) -> bytes:
        return self._aead.encrypt(self._nonce(), payload, None)

    def open(self, sealed: bytes) -> bytes:
        try:
            return self._aead.decrypt(self._nonce(), sealed, None)
        except InvalidTag as error:
            raise BadFrame("not sealed with this cluster's secret") from error


def _frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class Channel:
    """Bytes in, payloads out; what has to be sent gathers in `outgoing`. The initiator knows whom it calls."""

    def __init__(self, *, secret: bytes, own_id: int, members: Iterable[int], peer: int | None) -> None:
        self._secret = secret
        self._own_id = own_id
        self._members = sorted(members)
        self._initiator = peer is not None
        self._nonce = os.urandom(_NONCE_BYTES)
        self._incoming = bytearray()
        self._seal: _Cipher | None = None
        self._open: _Cipher | None = None
        self.outgoing = bytearray()
        self.peer = peer
        self.up = False
        if self._initiator:
            self.outgoing += _frame(_HELLO + self._nonce)

    def send(self, payload: bytes) -> None:
        assert self._seal is not None, "the keys come with the hello"
        self.outgoing += _frame(self._seal.seal(payload))

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that arrived, pings included as empty ones. Raises `BadFrame`: then the link is to be closed."""
        self._incoming += data
        payloads: list[bytes] = []
        start = 0
        while len(self._incoming) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            limit = FRAME_BYTES_MAX if self.up else GREETING_BYTES_MAX
            if length > limit:
                raise BadFrame(f"a frame of {length} bytes, allowed are {limit}")
            end = start + _LENGTH.size + length
            if end > len(self._incoming):
                break
            frame = bytes(self._incoming[start + _LENGTH.size : end])
            start = end
            if self._open is None:
                self._on_hello(frame)
            elif not self.up:
                self._on_name(self._open.open(frame))
            else:
                payloads.append(self._open.open(frame))
        del self._incoming[:start]
        return payloads

    def _on_hello(self, frame: bytes) -> None:
        if len(frame) != len(_HELLO) + _NONCE_BYTES or not frame.startswith(_HELLO):
            raise BadFrame("not a hello of this protocol")
        theirs = frame[len(_HELLO) :]
        if self._initiator:
            nonces, out, back = self._nonce + theirs, b"out", b"back"
        else:
            nonces, out, back = theirs + self._nonce, b"back", b"out"
            self.outgoing += _frame(_HELLO + self._nonce)
        self._seal = _Cipher(self._secret, out, nonces)
        self._open = _Cipher(self._secret, back, nonces)
        if self._initiator:
            self._send_name()

    def _send_name(self) -> None:
        self.send(msgspec.msgpack.encode((self._own_id, self.peer, self._members)))

    def _on_name(self, payload: bytes) -> None:
        try:
            sender, meant, members = msgspec.msgpack.decode(payload, type=tuple[int, int, list[int]])
        except msgspec.MsgspecError as error:
            raise BadFrame(f"not a name: {error}") from error
        if members != self._members or meant != self._own_id or sender == self._own_id or sender not in members:
            raise BadFrame(f"broker {sender} of {members} means {meant}; this is {self._own_id} of {self._members}")
        if self._initiator and sender != self.peer:
            raise BadFrame(f"broker {sender} answers in place of {self.peer}")
        self.peer = sender
        if not self._initiator:
            self._send_name()
        self.up = True
