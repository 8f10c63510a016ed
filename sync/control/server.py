"""The trainer's end of the control messages: calls of rollouts on a board."""

import concurrent.futures
import ipaddress

from absl import logging
import grpc

from laneweave.sync import rounds
from laneweave.sync.control import board as board_lib
from laneweave.sync.control import control_pb2, control_pb2_grpc
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

  def __init__(self, *, bind_ip: str, port: int):
    """Starts to listen.

    Args:
      bind_ip: Address to listen on.
      port: Port; 0 for one that is free.

    Raises:
      base.TransportError: the address cannot be listened on.
    """
    self.board = board_lib.Board()
    self._server = grpc.server(
      concurrent.futures.ThreadPoolExecutor(32, "control"),
      options=[
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
      ],
    )
    control_pb2_grpc.add_WeightSyncServicer_to_server(self, self._server)
    try:
      bound = self._server.add_insecure_port(f"{bind_ip}:{port}")
    except RuntimeError as error:
      raise base.TransportError(
        f"cannot listen on {bind_ip}:{port}: {error}; choose another port or"
        " `bind_ip`"
      ) from None
    self.address = f"{bind_ip}:{bound}"
    if not _is_loopback(bind_ip):
      logging.warning(
        "control messages on %s are neither encrypted nor signed: use a"
        " network that only the job can reach",
        self.address,
      )
    self._server.start()

  def close(self) -> None:
    """Says goodbye to rollouts and stops; idempotent."""
    self.board.close()
    self._server.stop(grace=1).wait(2)

  def Join(
    self, request: control_pb2.JoinRequest, context: grpc.ServicerContext
  ) -> control_pb2.JoinReply:
    """See control.proto."""
    problems = self.board.join(
      rounds.unit_from_wire(request.unit),
      self._activity(context),
      _poll_s(request.wait_s),
    )
    return control_pb2.JoinReply(
      problems=problems,
      nothing_staged=problems is None,
      session=self.board.session,
    )

  def NextRound(
    self, request: control_pb2.NextRoundRequest, context: grpc.ServicerContext
  ) -> control_pb2.RoundOffer:
    """See control.proto."""
    request.wait_s = _poll_s(request.wait_s)
    manifest, closed, error = self.board.next_round(
      request, self._activity(context)
    )
    return control_pb2.RoundOffer(
      manifest=None if manifest is None else rounds.manifest_to_wire(manifest),
      closed=closed,
      error=error,
    )

  def Receive(
    self, request: control_pb2.RoundKey, context: grpc.ServicerContext
  ) -> control_pb2.ReceiveReply:
    """See control.proto."""
    error, seconds = self.board.receive(request, self._activity(context))
    return control_pb2.ReceiveReply(error=error, transfer_s=seconds)

  def Report(
    self, request: control_pb2.ReportRequest, context: grpc.ServicerContext
  ) -> control_pb2.ReportReply:
    """See control.proto."""
    del context
    report = rounds.ReplicaReport(
      outcome=request.outcome,
      reason=request.reason,
      mismatched=tuple(request.mismatched),
      timings=dict(request.timings),
      peak_rss_bytes=request.peak_rss_bytes,
    )
    return control_pb2.ReportReply(error=self.board.report(request.key, report))

  def _activity(self, context) -> board_lib.Active:
    """Whether a caller is still there; the board wakes up when it leaves."""
    context.add_callback(self.board.wake)
    return context.is_active


def _poll_s(wait_s: float) -> float:
  """A caller's wait, within bounds; NaN is none."""
  return min(wait_s, _LONGEST_POLL_S) if wait_s > 0 else 0.0


def _is_loopback(ip: str) -> bool:
  try:
    return ipaddress.ip_address(ip.strip("[]")).is_loopback
  except ValueError:
    return ip == "localhost"
