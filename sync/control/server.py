"""The trainer's end of the control messages."""

import collections.abc
import concurrent.futures
import threading
import time

import grpc

from laneweave.sync import rounds
from laneweave.sync.control import control_pb2, control_pb2_grpc
from laneweave.sync.transport import base

# A message holds names, shapes and shards, about 200 bytes a variable.
MESSAGE_BYTES = 64 << 20
_POLL_S = 5.0
_FAREWELL_S = 5.0


class ControlServer(control_pb2_grpc.WeightSyncServicer):
  """Holds what rollouts ask for; one lock, one condition."""

  def __init__(self, *, bind_ip: str, port: int):
    """Starts to listen.

    Args:
      bind_ip: Address to listen on.
      port: Port; 0 for one that is free.

    Raises:
      base.TransportError: the address cannot be listened on.
    """
    self._change = threading.Condition()
    self._source: base.WorkUnit | None = None
    self._units: dict[str, base.WorkUnit] = {}
    self._manifest: rounds.RoundManifest | None = None
    self._ready: set[str] = set()
    self._landed: tuple[str, float] | None = None
    self._reports: dict[str, rounds.ReplicaReport] = {}
    self._closed = False
    self._told: set[str] = set()
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
    self._server.start()

  # What the trainer's session calls.

  def set_source(self, unit: base.WorkUnit) -> None:
    """Makes the trainer's side known; joins waiting for it go on."""
    with self._change:
      self._source = unit
      self._change.notify_all()

  def wait_joined(self, count: int, timeout_s: float) -> list[base.WorkUnit]:
    """Waits until `count` rollouts have joined."""
    with self._change:
      if not self._change.wait_for(
        lambda: len(self._units) >= count, timeout_s
      ):
        raise base.TransportError(
          f"{len(self._units)} of {count} rollouts joined within"
          f" {timeout_s:.0f} s; start them with"
          f" --controller_address={self.address}"
        )
      return list(self._units.values())

  def offer(self, manifest: rounds.RoundManifest) -> None:
    """Offers a round to every rollout."""
    with self._change:
      self._manifest = manifest
      self._ready, self._reports, self._landed = set(), {}, None
      self._change.notify_all()

  def wait_ready(
    self, replicas: collections.abc.Collection[str], timeout_s: float
  ) -> set[str]:
    """Waits until these rollouts are ready or gave up; those ready."""
    with self._change:
      self._change.wait_for(
        lambda: set(replicas) <= self._ready | self._reports.keys(),
        timeout_s,
      )
      return self._ready & set(replicas)

  def landed(self, error: str, transfer_s: float) -> None:
    """Says that the transfer is over."""
    with self._change:
      self._landed = (error, transfer_s)
      self._change.notify_all()

  def wait_reports(
    self, replicas: collections.abc.Collection[str], timeout_s: float
  ) -> dict[str, rounds.ReplicaReport]:
    """Waits for reports; those that came."""
    with self._change:
      self._change.wait_for(
        lambda: set(replicas) <= self._reports.keys(), timeout_s
      )
      return dict(self._reports)

  def forget(self, replica: str) -> None:
    """Forgets a rollout that said nothing; it must join again."""
    with self._change:
      self._units.pop(replica, None)

  def close(self) -> None:
    """Tells rollouts that there is no next round, and stops; idempotent."""
    with self._change:
      self._closed = True
      self._change.notify_all()
      # Rollouts ask for the next round after they reported: let them hear.
      self._change.wait_for(
        lambda: self._units.keys() <= self._told, _FAREWELL_S
      )
    self._server.stop(grace=1).wait(2)

  # What rollouts call.

  def Join(
    self, request: control_pb2.JoinRequest, context: grpc.ServicerContext
  ) -> control_pb2.JoinReply:
    """See control.proto."""
    unit = rounds.unit_from_wire(request.unit)
    with self._change:
      self._wait(context, lambda: self._source is not None or self._closed)
      if self._source is None:
        return control_pb2.JoinReply(
          problems=["the trainer has nothing to offer"]
        )
      problems = base.preflight(self._source, unit)
      if not problems:
        self._units[unit.replica] = unit
        self._change.notify_all()
      return control_pb2.JoinReply(problems=problems)

  def NextRound(
    self, request: control_pb2.NextRoundRequest, context: grpc.ServicerContext
  ) -> control_pb2.RoundOffer:
    """See control.proto."""

    def is_new() -> bool:
      current = self._manifest
      return current is not None and current.round_id > request.after_round

    with self._change:
      self._wait(context, lambda: self._closed or is_new())
      offer = control_pb2.RoundOffer(closed=self._closed)
      if self._closed:
        self._told.add(request.replica)
        self._change.notify_all()
      elif self._manifest is not None and is_new():
        offer.manifest.CopyFrom(rounds.manifest_to_wire(self._manifest))
      return offer

  def Receive(
    self, request: control_pb2.RoundKey, context: grpc.ServicerContext
  ) -> control_pb2.ReceiveReply:
    """See control.proto."""
    with self._change:
      if error := self._stale(request):
        return control_pb2.ReceiveReply(error=error)
      self._ready.add(request.replica)
      self._change.notify_all()
      self._wait(
        context, lambda: self._landed is not None or self._closed, slices=None
      )
      if self._landed is None:
        return control_pb2.ReceiveReply(error="the trainer ended the session")
      error, seconds = self._landed
      return control_pb2.ReceiveReply(error=error, transfer_s=seconds)

  def Report(
    self, request: control_pb2.ReportRequest, context: grpc.ServicerContext
  ) -> control_pb2.ReportReply:
    """See control.proto."""
    del context
    with self._change:
      if error := self._stale(request.key):
        return control_pb2.ReportReply(error=error)
      self._reports[request.key.replica] = rounds.ReplicaReport(
        outcome=request.outcome,
        reason=request.reason,
        mismatched=tuple(request.mismatched),
        timings=dict(request.timings),
        peak_rss_bytes=request.peak_rss_bytes,
      )
      self._change.notify_all()
    return control_pb2.ReportReply()

  def _stale(self, key) -> str:
    current = self._manifest
    if current is None:
      return f"round {key.round_id} is unknown: none was offered yet"
    if (key.round_id, key.version) != (current.round_id, current.version):
      return (
        f"round {key.round_id}, version {key.version} is not the current"
        f" one ({current})"
      )
    return ""

  def _wait(self, context, done, slices: float | None = _POLL_S):
    """Waits on the condition until done or the caller has given up."""
    end = None if slices is None else time.monotonic() + slices
    while not done() and context.is_active():
      if end is not None and time.monotonic() >= end:
        return
      self._change.wait(0.5)
