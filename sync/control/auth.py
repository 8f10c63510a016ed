"""Authenticates control messages and manifests: HMAC-SHA256, one shared key.

Every message but Hello travels in an envelope. Its code is over

    direction, method, session, caller, sequence, body

each part preceded by its length. `session` is random and the trainer's own:
what was said to an earlier trainer is nothing to a later one. `caller` is
random and each rollout's own, and `sequence` counts its messages: the trainer
takes each once, and a rollout takes an answer only for the question it asked
last. A manifest is signed once more by itself, so that whoever holds one can
tell where it came from.

Without a key envelopes have no code and nothing is refused: fit for loopback
only, which `keys.require` sees to.
"""

import collections.abc
import dataclasses
import hashlib
import hmac
import secrets
import threading

from laneweave.sync import rounds
from laneweave.sync.control import control_pb2
from laneweave.sync.transport import base

REQUEST, REPLY = b"request", b"reply"
_MANIFEST = b"manifest"
# Changes when what a code is over does.
_DOMAIN = b"laneweave control 1"
_CALLER_BYTES = 16
# Messages of one caller that may overtake each other.
_WINDOW = 64
# Rollouts that were ever started in a trainer's session. What is remembered of
# one is never forgotten, or its messages could be played again.
_MOST_CALLERS = 1 << 16


class AuthenticationError(base.TransportError):
  """A message or a manifest is not from who holds the key, or an old one."""


def _code(key: bytes | None, *parts: bytes) -> bytes:
  """The authentication code of some parts; empty without a key."""
  if key is None:
    return b""
  text = b"".join(
    len(part).to_bytes(8, "big") + part for part in (_DOMAIN, *parts)
  )
  return hmac.new(key, text, hashlib.sha256).digest()


def _check(key: bytes | None, code: bytes, what: str, *parts: bytes) -> None:
  """Compares a code in constant time."""
  if hmac.compare_digest(_code(key, *parts), code):
    return
  if key is None:
    reason = "is signed and this side has no `auth_key`"
  elif not code:
    reason = "is not signed"
  else:
    reason = "was signed with another key, or changed"
  raise AuthenticationError(
    f"{what} {reason}; both sides need the same --auth_key_file"
  )


def sign(m: rounds.RoundManifest, key: bytes | None) -> rounds.RoundManifest:
  """A manifest with its signature.

  Args:
    m: The manifest.
    key: The key; None: the signature is empty.

  Returns:
    The manifest, signed.
  """
  text = rounds.bytes_to_sign(rounds.manifest_to_wire(m))
  return dataclasses.replace(m, signature=_code(key, _MANIFEST, text))


def check_manifest(m: rounds.RoundManifest, key: bytes | None) -> None:
  """Checks that a manifest was signed with a key and not changed since.

  Args:
    m: The manifest.
    key: The key, or None for no signature.

  Raises:
    AuthenticationError: it was not.
  """
  text = rounds.bytes_to_sign(rounds.manifest_to_wire(m))
  _check(key, m.signature, f"the manifest of {m}", _MANIFEST, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """What a question and its answer have in common.

  Attributes:
    method: Name of the call.
    session: The trainer's session.
    caller: Who asks.
    sequence: Which of the caller's questions.
  """

  method: str
  session: str
  caller: bytes
  sequence: int

  def seal(
    self, key: bytes | None, direction: bytes, body: bytes
  ) -> control_pb2.Envelope:
    """Puts a message in an envelope.

    Args:
      key: The key, or None.
      direction: `REQUEST` or `REPLY`.
      body: The message.

    Returns:
      The envelope.
    """
    return control_pb2.Envelope(
      body=body,
      session=self.session,
      caller=self.caller,
      sequence=self.sequence,
      mac=_code(key, *self._parts(direction, body)),
    )

  def check(
    self, key: bytes | None, direction: bytes, found: control_pb2.Envelope
  ) -> None:
    """Checks that an envelope belongs to this question.

    Args:
      key: The key, or None.
      direction: `REQUEST` or `REPLY`.
      found: The envelope; only its body and its code are looked at.

    Raises:
      AuthenticationError: it does not.
    """
    what = f"the {direction.decode()} of {self.method}"
    _check(key, found.mac, what, *self._parts(direction, found.body))

  def _parts(self, direction, body) -> collections.abc.Iterator[bytes]:
    yield direction
    yield self.method.encode()
    yield self.session.encode()
    yield self.caller
    yield self.sequence.to_bytes(8, "big")
    yield body


class Caller:
  """Numbers one rollout's questions, as long as its process lives."""

  def __init__(self):
    """Draws a random name."""
    self._name = secrets.token_bytes(_CALLER_BYTES)
    self._lock = threading.Lock()
    self._sequence = 0

  def ask(self, method: str, session: str) -> Question:
    """The next question."""
    with self._lock:
      self._sequence += 1
      return Question(
        method=method,
        session=session,
        caller=self._name,
        sequence=self._sequence,
      )


class Gate:
  """The trainer's: lets every authentic question in once."""

  def __init__(self, key: bytes | None, session: str):
    """Nobody has called yet.

    Args:
      key: The key, or None.
      session: The trainer's session.
    """
    self._key = key
    self._session = session
    self._lock = threading.Lock()
    # The highest sequence of a caller, and which of those below it were seen.
    self._seen: dict[bytes, tuple[int, int]] = {}

  def enter(self, method: str, found: control_pb2.Envelope) -> Question:
    """Takes a question in.

    Args:
      method: The call it came by.
      found: Its envelope.

    Returns:
      What to seal the answer with.

    Raises:
      AuthenticationError: forged, changed, or seen before.
    """
    question = Question(
      method=method,
      session=self._session,
      caller=found.caller,
      sequence=found.sequence,
    )
    question.check(self._key, REQUEST, found)
    if self._key is not None:
      self._count(question)
    return question

  def _count(self, question: Question) -> None:
    """Notes an authentic question; refuses one that was noted before."""
    with self._lock:
      highest, mask = self._seen.get(question.caller, (0, 0))
      ahead = question.sequence - highest
      if ahead > 0:
        highest, mask = question.sequence, (mask << ahead) | 1
      elif ahead <= -_WINDOW or mask >> -ahead & 1:
        raise AuthenticationError(
          f"the request of {question.method} was played again: message"
          f" {question.sequence} of its caller came before"
        )
      else:
        mask |= 1 << -ahead
      if len(self._seen) >= _MOST_CALLERS and question.caller not in self._seen:
        raise AuthenticationError(
          f"{_MOST_CALLERS} rollouts have called in this session, no more can"
          " be told apart; start the trainer again"
        )
      self._seen[question.caller] = highest, mask & ((1 << _WINDOW) - 1)

  def seal(self, question: Question, body: bytes) -> control_pb2.Envelope:
    """Puts an answer in its envelope."""
    return question.seal(self._key, REPLY, body)
