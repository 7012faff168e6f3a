"""Proof that two processes hold the same key, and authentication tags of messages.

    listening side    challenge: a name of the protocol and 32 random bytes
    connecting side   32 random bytes of its own, and the proof of "connects"
    listening side    the proof of "listens"

A proof is HMAC-SHA256 under the key over a role and both sides' random bytes. The roles differ, so
a returned proof is not valid. Until the connecting side has proved itself, the listening side reads
at most 64 bytes. Then each direction has its own tag key. A tag covers the message's number: a
process in between can neither alter nor repeat nor reorder messages. It can read them: nothing is
encrypted.
"""

import hmac
import os
import socket
import time

from hybridrt.base.errors import AuthenticationError, ConfigError, MessageError, PeerGoneError

MIN_KEY_BYTES = 16
NONCE_BYTES = PROOF_BYTES = 32
TAG_BYTES = 16
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES

_NAME = b"hybridrt channel 1"


def check_key(what: str, key: bytes) -> None:
    """ConfigError if a key that the user has chosen is too short. `what` names it."""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{what} has {len(key)} bytes; it needs {MIN_KEY_BYTES} that cannot be guessed, for example the output of: "
            "openssl rand -hex 32"
        )


class Tagger:
    """Tags what one side sends and checks what it receives. MessageError if a tag is wrong."""

    def __init__(self, outgoing: bytes, incoming: bytes) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._sent = self._received = 0

    def tag(self, data: bytes) -> bytes:
        self._sent += 1
        return _tag(self._outgoing, self._sent, data)

    def check_tag(self, data: bytes, tag: bytes) -> None:
        self._received += 1
        if not hmac.compare_digest(tag, _tag(self._incoming, self._received, data)):
            raise MessageError("a message does not bear the tag of the process that connected")


class Challenge:
    """What the listening side sends first, and its check of the answer."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.data = _NAME + os.urandom(NONCE_BYTES)

    def check_answer(self, answer: bytes) -> tuple[bytes, Tagger]:
        """Our proof, to be sent, and the connection's tagger.

        Raises:
            AuthenticationError: the other side does not have the key.
        """
        both = self.data + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(self._key, b"connects", both)):
            raise AuthenticationError("a process that connected does not hold the key")
        return _proof(self._key, b"listens", both), _tagger(self._key, both, b"listens", b"connects")


def prove_key(connection: socket.socket, key: bytes, deadline: float) -> Tagger:
    """Proves to the listening side that this process holds the key, and checks its proof. Waits
    until `deadline` (of time.monotonic) at most.

    Raises:
        PeerGoneError: the other side does not answer in time, or hangs up.
        AuthenticationError: it does not have the key, or refuses ours.
    """
    try:
        challenge = _read(connection, len(_NAME) + NONCE_BYTES, deadline)
        if not challenge.startswith(_NAME):
            raise AuthenticationError("the other process speaks another protocol")
        nonce = os.urandom(NONCE_BYTES)
        both = challenge + nonce
        connection.sendall(nonce + _proof(key, b"connects", both))
    except (OSError, EOFError) as e:
        raise PeerGoneError(f"the other process does not answer ({e})") from e
    try:
        proof = _read(connection, PROOF_BYTES, deadline)
    except TimeoutError as e:
        raise PeerGoneError(f"the other process does not answer ({e})") from e
    except (OSError, EOFError) as e:
        raise AuthenticationError("the other process refuses our key; both need the same one") from e
    if not hmac.compare_digest(proof, _proof(key, b"listens", both)):
        raise AuthenticationError("the other process does not hold our key; both need the same one")
    return _tagger(key, both, b"connects", b"listens")


def _proof(key: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + both, "sha256")


def _tagger(key: bytes, both: bytes, ours: bytes, theirs: bytes) -> Tagger:
    return Tagger(_proof(key, b"messages of " + ours, both), _proof(key, b"messages of " + theirs, both))


def _tag(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + data, "sha256")[:TAG_BYTES]


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("it closed the connection")
        data += piece
    return data
