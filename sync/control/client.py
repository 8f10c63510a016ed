"""A rollout's end of the control messages."""

import time
from typing import Any

from google.protobuf import message as protobuf
import grpc

from laneweave.sync import rounds
from laneweave.sync.control import (
  auth,
  control_pb2,
  control_pb2_grpc,
  server,
)
from laneweave.sync.transport import base

# Beyond what the trainer was asked to wait: for the answer to come.
_ANSWER_S = 10.0
_POLL_S = 5.0
_REPLIES = {
  "Join": control_pb2.JoinReply,
  "NextRound": control_pb2.RoundOffer,
  "Receive": control_pb2.ReceiveReply,
  "Report": control_pb2.ReportReply,
}


class ControlClient:
  """Calls a trainer; every call has a deadline.

  Attributes:
    session: The trainer's session; "" before it was joined.
  """

  def __init__(
    self, address: str, replica: str, *, auth_key: bytes | None = None
  ):
    """Keeps the address; nothing is sent yet.

    Args:
      address: "host:port" of the trainer's control service.
      replica: Name of this rollout.
      auth_key: The key that messages are signed with; None: they are not.
    """
    self._address = address
    self._replica = replica
    self._key = auth_key
    self._caller = auth.Caller()
    # As the trainer's Hello has it. Anyone can say Hello: a wrong one makes
    # messages that the trainer refuses, and answers that fail their check.
    self._said = ""
    self.session = ""
    self._channel = grpc.insecure_channel(
      address,
      options=[
        ("grpc.max_receive_message_length", server.MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
        # A trainer that is started again is found again soon.
        ("grpc.max_reconnect_backoff_ms", 1000),
      ],
    )
    self._stub = control_pb2_grpc.WeightSyncStub(self._channel)

  def join(self, unit: base.WorkUnit, timeout_s: float) -> None:
    """Joins a trainer, waiting for one that is not there yet.

    Args:
      unit: This rollout's side.
      timeout_s: How long to wait for the trainer and its first weights.

    Raises:
      base.MismatchError: the trainer holds other arrays.
      base.TransportError: no trainer in time.
    """
    request = control_pb2.JoinRequest(unit=rounds.unit_to_wire(unit))
    deadline = time.monotonic() + timeout_s
    said = "nobody answered"
    while (left := deadline - time.monotonic()) > 0:
      try:
        self._hello(left)
        request.wait_s = min(deadline - time.monotonic(), _POLL_S)
        reply = self._ask("Join", request, request.wait_s + _ANSWER_S)
      except grpc.RpcError as error:
        if error.code() not in (
          grpc.StatusCode.DEADLINE_EXCEEDED,
          grpc.StatusCode.UNAVAILABLE,
          # Another trainer came between the two calls.
          grpc.StatusCode.FAILED_PRECONDITION,
        ):
          raise self._failed("Join", error) from None
        time.sleep(0.1)
        continue
      if reply.problems:
        raise base.MismatchError("trainer and rollout", reply.problems)
      if not reply.nothing_staged:
        self.session = reply.session
        return
      said = "it has nothing staged"
    raise base.TransportError(
      f"no trainer with weights to offer at {self._address} within"
      f" {timeout_s:.0f} s ({said}); check `controller_address` and that the"
      " trainer runs"
    )

  def next_round(
    self, after_round: int, timeout_s: float
  ) -> rounds.RoundManifest | None:
    """Waits for the round after one.

    Args:
      after_round: The last round this rollout knows.
      timeout_s: How long to wait.

    Returns:
      The manifest, or None when the trainer has ended.

    Raises:
      base.TransportError: the trainer is gone or does not know this rollout,
        or nothing came in time.
    """
    deadline = time.monotonic() + timeout_s
    request = control_pb2.NextRoundRequest(
      replica=self._replica, after_round=after_round, session=self.session
    )
    while (left := deadline - time.monotonic()) > 0:
      request.wait_s = min(left, _POLL_S)
      offer = self._call("NextRound", request, request.wait_s + _ANSWER_S)
      if offer.closed:
        return None
      if offer.error:
        raise base.TransportError(offer.error)
      if offer.HasField("manifest"):
        return rounds.manifest_from_wire(offer.manifest)
    raise base.TransportError(
      f"the trainer at {self._address} offered no round after {after_round}"
      f" within {timeout_s:.0f} s"
    )

  def receive(self, key: control_pb2.RoundKey, timeout_s: float) -> float:
    """Waits until a round's bytes have landed.

    Args:
      key: The round.
      timeout_s: How long to wait.

    Returns:
      Seconds that the transfer took.

    Raises:
      base.TransportError: the transfer failed or the trainer is gone.
    """
    reply = self._call("Receive", key, timeout_s)
    if reply.error:
      raise base.TransportError(reply.error)
    return reply.transfer_s

  def report(self, request: control_pb2.ReportRequest) -> None:
    """Reports what became of a round.

    Args:
      request: The report.

    Raises:
      base.TransportError: the trainer is gone or knows another round.
    """
    reply = self._call("Report", request, _ANSWER_S)
    if reply.error:
      raise base.TransportError(reply.error)

  def key(self, manifest: rounds.RoundManifest) -> control_pb2.RoundKey:
    """The key of a round for this rollout's calls."""
    return control_pb2.RoundKey(
      replica=self._replica,
      session=manifest.session,
      round_id=manifest.round_id,
      version=manifest.version,
    )

  def close(self) -> None:
    """Closes the channel; idempotent."""
    self._channel.close()

  def _hello(self, timeout_s) -> None:
    """Learns the trainer's session; waits for a trainer to be there."""
    request = control_pb2.HelloRequest()
    try:
      reply = self._stub.Hello(request, timeout=timeout_s, wait_for_ready=True)
    except ValueError as error:
      raise base.TransportError(f"Hello after close(): {error}") from None
    self._said = reply.session

  def _ask(self, method, request, timeout_s) -> Any:
    """Sends a signed question; its answer, which is authentic."""
    question = self._caller.ask(method, self._said)
    envelope = question.seal(
      self._key, auth.REQUEST, request.SerializeToString()
    )
    try:
      answer = getattr(self._stub, method)(envelope, timeout=timeout_s)
      question.check(self._key, auth.REPLY, answer)
      return _REPLIES[method].FromString(answer.body)
    except protobuf.DecodeError:
      raise base.TransportError(
        f"what {self._address} answered is no {_REPLIES[method].__name__}"
      ) from None
    except ValueError as error:
      raise base.TransportError(f"{method} after close(): {error}") from None

  def _call(self, method, request, timeout_s) -> Any:
    try:
      if not self._said:
        self._hello(timeout_s)
      return self._ask(method, request, timeout_s)
    except grpc.RpcError as error:
      raise self._failed(method, error) from None

  def _failed(self, method, error) -> base.TransportError:
    code, details = error.code(), " ".join((error.details() or "").split())
    kind = base.TransportError
    if code == grpc.StatusCode.UNAUTHENTICATED:
      kind, said = auth.AuthenticationError, f"refused this rollout: {details}"
    elif code == grpc.StatusCode.FAILED_PRECONDITION:
      said = f"does not know this rollout: {details}"
    elif code == grpc.StatusCode.UNAVAILABLE:
      said = "is gone or cannot be reached"
    elif code == grpc.StatusCode.DEADLINE_EXCEEDED:
      said = "did not answer in time"
    else:
      said = f"failed with {code.name}: {details}"
    return kind(f"the trainer at {self._address} {said} ({method})")
