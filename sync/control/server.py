"""The trainer's end of the control messages: calls of rollouts on a board."""

import concurrent.futures
from typing import NoReturn

from google.protobuf import message as protobuf
import grpc

from laneweave.sync import rounds
from laneweave.sync.control import auth, control_pb2, control_pb2_grpc
from laneweave.sync.control import board as board_lib
from laneweave.sync.transport import base

# A message holds names, shapes and shards, about 200 bytes a variable.
MESSAGE_BYTES = 64 << 20
_LONGEST_POLL_S = 10.0


class ControlServer(control_pb2_grpc.WeightSyncServicer):
  """The service of control.proto.

  Attributes:
    address: "host:port" that rollouts join.
    board: What the trainer's session writes on.
  """

  def __init__(self, *, bind_ip: str, port: int, auth_key: bytes | None = None):
    """Starts to listen.

    Args:
      bind_ip: Address to listen on.
      port: Port; 0 for one that is free.
      auth_key: The key that messages are signed with; None: they are not.

    Raises:
      base.TransportError: the address cannot be listened on.
    """
    self.board = board_lib.Board()
    self._gate = auth.Gate(auth_key, self.board.session)
    self._server = grpc.server(
      concurrent.futures.ThreadPoolExecutor(32, "control"),
      options=[
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
      ],
    )
    control_pb2_grpc.add_WeightSyncServicer_to_server(self, self._server)
    host = f"[{bind_ip}]" if ":" in bind_ip else bind_ip
    try:
      bound = self._server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
      raise base.TransportError(
        f"cannot listen on {host}:{port}: {error}; choose another port or"
        " `bind_ip`"
      ) from None
    self.address = f"{host}:{bound}"
    self._server.start()

  def close(self) -> None:
    """Says goodbye to rollouts and stops; idempotent."""
    self.board.close()
    self._server.stop(grace=1).wait(2)

  def Hello(
    self, request: control_pb2.HelloRequest, context: grpc.ServicerContext
  ) -> control_pb2.HelloReply:
    """See control.proto."""
    del request, context
    return control_pb2.HelloReply(session=self.board.session)

  def Join(
    self, request: control_pb2.Envelope, context: grpc.ServicerContext
  ) -> control_pb2.Envelope:
    """See control.proto."""
    return self._answer("Join", request, context)

  def NextRound(
    self, request: control_pb2.Envelope, context: grpc.ServicerContext
  ) -> control_pb2.Envelope:
    """See control.proto."""
    return self._answer("NextRound", request, context)

  def Receive(
    self, request: control_pb2.Envelope, context: grpc.ServicerContext
  ) -> control_pb2.Envelope:
    """See control.proto."""
    return self._answer("Receive", request, context)

  def Report(
    self, request: control_pb2.Envelope, context: grpc.ServicerContext
  ) -> control_pb2.Envelope:
    """See control.proto."""
    return self._answer("Report", request, context)

  def _answer(self, method, envelope, context) -> control_pb2.Envelope:
    """Opens a question's envelope and seals its answer."""
    kind, answer = {
      "Join": (control_pb2.JoinRequest, self._join),
      "NextRound": (control_pb2.NextRoundRequest, self._next_round),
      "Receive": (control_pb2.RoundKey, self._receive),
      "Report": (control_pb2.ReportRequest, self._report),
    }[method]
    if envelope.session != self.board.session:
      _refuse(
        context,
        grpc.StatusCode.FAILED_PRECONDITION,
        f"not in the trainer's session {self.board.session}; join again",
      )
    try:
      question = self._gate.enter(method, envelope)
      request = kind.FromString(envelope.body)
    except auth.AuthenticationError as error:
      _refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
    except protobuf.DecodeError:
      _refuse(
        context, grpc.StatusCode.INVALID_ARGUMENT, f"no {kind.DESCRIPTOR.name}"
      )
    # The board wakes up when a caller leaves.
    context.add_callback(self.board.wake)
    reply = answer(request, context.is_active)
    return self._gate.seal(question, reply.SerializeToString())

  def _join(self, request, active) -> control_pb2.JoinReply:
    problems = self.board.join(
      rounds.unit_from_wire(request.unit), active, _poll_s(request.wait_s)
    )
    return control_pb2.JoinReply(
      problems=problems,
      nothing_staged=problems is None,
      session=self.board.session,
    )

  def _next_round(self, request, active) -> control_pb2.RoundOffer:
    request.wait_s = _poll_s(request.wait_s)
    manifest, closed, error = self.board.next_round(request, active)
    return control_pb2.RoundOffer(
      manifest=None if manifest is None else rounds.manifest_to_wire(manifest),
      closed=closed,
      error=error,
    )

  def _receive(self, request, active) -> control_pb2.ReceiveReply:
    error, seconds = self.board.receive(request, active)
    return control_pb2.ReceiveReply(error=error, transfer_s=seconds)

  def _report(self, request, active) -> control_pb2.ReportReply:
    del active
    report = rounds.ReplicaReport(
      outcome=request.outcome,
      reason=request.reason,
      mismatched=tuple(request.mismatched),
      timings=dict(request.timings),
      peak_rss_bytes=request.peak_rss_bytes,
    )
    return control_pb2.ReportReply(error=self.board.report(request.key, report))


def _refuse(context, code: grpc.StatusCode, details: str) -> NoReturn:
  context.abort(code, details)
  raise AssertionError("abort() does not return")


def _poll_s(wait_s: float) -> float:
  """A caller's wait, within bounds; NaN is none."""
  return min(wait_s, _LONGEST_POLL_S) if wait_s > 0 else 0.0
