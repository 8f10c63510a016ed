"""What a trainer and its rollouts know of each other; one lock, one condition.

The trainer's session writes on the board and waits; calls of rollouts, each in
a thread of its own, do the same from the other side.
"""

import collections.abc
import dataclasses
import secrets
import threading
import time

from absl import logging

from laneweave.sync import rounds
from laneweave.sync.control import control_pb2
from laneweave.sync.transport import base, preflight

_FAREWELL_S = 5.0
# For the report of a rollout whose call broke off, if it is still there.
_LOST_S = 3.0

# Whether the caller is still there.
type Active = collections.abc.Callable[[], bool]


@dataclasses.dataclass(kw_only=True)
class Round:
  """The round on offer.

  Attributes:
    manifest: Its manifest.
    replicas: The rollouts that take part.
    ready: Those whose staging is bound and that wait for the bytes.
    moving: Those that the transfer is for, once it has begun.
    landed: How the transfer ended: an error or "", and its seconds.
    reports: What became of it.
    lost: When the waiting call of a rollout broke off, by replica.
  """

  manifest: rounds.RoundManifest
  replicas: frozenset[str]
  ready: set[str] = dataclasses.field(default_factory=set)
  moving: frozenset[str] | None = None
  landed: tuple[str, float] | None = None
  reports: dict[str, rounds.ReplicaReport] = dataclasses.field(
    default_factory=dict
  )
  lost: dict[str, float] = dataclasses.field(default_factory=dict)

  def given_up(self) -> set[str]:
    """Rollouts that broke off and did not report in time."""
    now = time.monotonic()
    return {r for r, since in self.lost.items() if now - since > _LOST_S}


class Board:
  """State of a trainer's session.

  Attributes:
    session: Random name of the session.
  """

  def __init__(self):
    """Nobody has joined and nothing is staged."""
    self.session = secrets.token_hex(16)
    self._change = threading.Condition()
    self._source: base.WorkUnit | None = None
    self._units: dict[str, base.WorkUnit] = {}
    self._served: dict[str, int] = {}
    self._round: Round | None = None
    self._closed = False
    self._told: set[str] = set()

  # What the trainer's session calls.

  def set_source(self, unit: base.WorkUnit) -> None:
    """Makes the trainer's side known; joins waiting for it go on."""
    with self._change:
      if self._source is not None and self._source.variables != unit.variables:
        self._units = {
          replica: joined
          for replica, joined in self._units.items()
          if not preflight.preflight(unit, joined)
        }
      self._source = unit
      self._change.notify_all()

  def wait_joined(self, count: int, timeout_s: float) -> list[base.WorkUnit]:
    """Waits until `count` rollouts have joined; those that have."""
    with self._change:
      self._change.wait_for(lambda: len(self._units) >= count, timeout_s)
      return list(self._units.values())

  def served(self, replica: str) -> int | None:
    """The version a rollout published last in this session, if any."""
    with self._change:
      return self._served.get(replica)

  def offer(
    self,
    manifest: rounds.RoundManifest,
    replicas: collections.abc.Collection[str],
  ) -> None:
    """Offers a round to these rollouts."""
    with self._change:
      self._round = Round(manifest=manifest, replicas=frozenset(replicas))
      self._change.notify_all()

  def begin(self, timeout_s: float) -> frozenset[str]:
    """Waits for the rollouts; from then on nobody can take part any more.

    Args:
      timeout_s: How long to wait for those that are neither ready nor gone.

    Returns:
      The rollouts that the transfer is for.
    """
    with self._change:
      current = self._current()
      self._wait_until(
        lambda: (
          self._closed
          or current.replicas
          <= current.ready | current.reports.keys() | current.given_up()
        ),
        timeout_s,
      )
      current.moving = frozenset(
        current.ready - current.reports.keys() - current.lost.keys()
      )
      return current.moving

  def landed(self, error: str, transfer_s: float) -> None:
    """Says that the transfer is over."""
    with self._change:
      self._current().landed = (error, transfer_s)
      self._change.notify_all()

  def end(self, timeout_s: float) -> dict[str, rounds.ReplicaReport]:
    """Waits for reports.

    Args:
      timeout_s: How long to wait for the rollouts that the transfer was for.

    Returns:
      A report of every rollout that took part. One that said nothing in time
      has to join again; it is `UNKNOWN` if the bytes reached it, and else
      `ABORTED`, since the round can no longer reach it.
    """
    with self._change:
      current = self._current()
      moving = current.moving or frozenset()
      self._wait_until(
        lambda: (
          self._closed or moving <= current.reports.keys() | current.given_up()
        ),
        timeout_s,
      )
      reports = dict(current.reports)
      failed = "" if current.landed is None else current.landed[0]
      for replica in current.replicas - reports.keys():
        self._units.pop(replica, None)
        lost = replica in current.lost
        reason = "it broke off" if lost else f"silent for {timeout_s:.0f} s"
        # Only one that the bytes reached can have published them.
        reached = replica in moving and not failed
        reports[replica] = rounds.ReplicaReport(
          outcome=rounds.UNKNOWN if reached else rounds.ABORTED, reason=reason
        )
      return reports

  def _current(self) -> Round:
    if self._round is None:
      raise rounds.RoundError("no round was offered yet")
    return self._round

  def _wait_until(self, done, timeout_s) -> None:
    """Waits on the condition; `done` may depend on the time."""
    end = time.monotonic() + timeout_s
    while not done() and (left := end - time.monotonic()) > 0:
      self._change.wait(min(left, 0.5))

  def close(self) -> None:
    """Ends every wait and tells rollouts that there is no next round.

    Idempotent.
    """
    with self._change:
      self._closed = True
      self._change.notify_all()
      # Rollouts ask for the next round after they reported: let them hear.
      self._wait_until(lambda: self._units.keys() <= self._told, _FAREWELL_S)
      self._units = {}

  def wake(self) -> None:
    """Makes calls look again whether their callers are still there."""
    with self._change:
      self._change.notify_all()

  # What the calls of rollouts do.

  def join(
    self, unit: base.WorkUnit, active: Active, wait_s: float
  ) -> list[str] | None:
    """Lets a rollout join.

    Args:
      unit: The rollout's side.
      active: Whether the caller is still there.
      wait_s: How long to wait for the trainer's first version.

    Returns:
      What keeps it from joining; None while nothing is staged.
    """
    with self._change:
      self._hold(
        active, lambda: self._source is not None or self._closed, wait_s
      )
      if self._source is None:
        return None
      problems = preflight.preflight(self._source, unit)
      if not problems:
        known = self._units.get(unit.replica)
        if known is not None and known != unit:
          logging.warning("rollout %s is replaced by a new one", unit.replica)
        self._units[unit.replica] = unit
        self._served.pop(unit.replica, None)
        self._change.notify_all()
      return problems

  def next_round(
    self, request: control_pb2.NextRoundRequest, active: Active
  ) -> tuple[rounds.RoundManifest | None, bool, str]:
    """Waits for a round that a rollout takes part in.

    Args:
      request: Who asks, and for what.
      active: Whether the caller is still there.

    Returns:
      The manifest, if there is one; whether the session has ended; why this
      rollout gets no rounds, or "".
    """

    def offered() -> rounds.RoundManifest | None:
      current = self._round
      if (
        current is None
        or request.replica not in current.replicas
        or current.moving is not None
        or current.manifest.round_id <= request.after_round
      ):
        return None
      return current.manifest

    def is_known() -> bool:
      return request.session == self.session and request.replica in self._units

    with self._change:
      self._hold(
        active,
        lambda: self._closed or not is_known() or offered() is not None,
        request.wait_s,
      )
      if self._closed:
        self._told.add(request.replica)
        self._change.notify_all()
        return None, True, ""
      if not is_known():
        why = f"not in the trainer's session {self.session}; join again"
        return None, False, f"rollout {request.replica} is {why}"
      return offered(), False, ""

  def receive(
    self, key: control_pb2.RoundKey, active: Active
  ) -> tuple[str, float]:
    """Waits for the bytes of a round.

    Args:
      key: The round and who asks.
      active: Whether the caller is still there.

    Returns:
      Why no bytes landed, or ""; seconds that the transfer took.
    """
    with self._change:
      current, error = self._find(key)
      if current is None:
        return error, 0.0
      late = (
        f"{current.manifest}: the transfer began without rollout {key.replica}"
      )
      if current.moving is None:
        current.ready.add(key.replica)
        current.lost.pop(key.replica, None)
        self._change.notify_all()
      elif key.replica not in current.moving:
        return late, 0.0
      self._hold(
        active,
        lambda: (
          current.landed is not None
          or self._closed
          or self._round is not current
        ),
      )
      if current.landed is None or not active():
        current.lost[key.replica] = time.monotonic()
        self._change.notify_all()
        return f"{current.manifest}: the trainer gave it up", 0.0
      if key.replica not in (current.moving or ()):
        return late, 0.0
      return current.landed

  def report(
    self, key: control_pb2.RoundKey, report: rounds.ReplicaReport
  ) -> str:
    """Takes note of what became of a round; "" or why not."""
    with self._change:
      current, error = self._find(key)
      if current is None:
        return error
      if report.outcome not in (rounds.PUBLISHED, rounds.ABORTED):
        return f"{report.outcome!r} is no outcome of a rollout"
      current.reports[key.replica] = report
      if report.outcome == rounds.PUBLISHED:
        self._served[key.replica] = key.version
      self._change.notify_all()
      return ""

  def _find(self, key) -> tuple[Round | None, str]:
    """The round a key is for, or why there is none."""
    current = self._round
    said = f"round {key.round_id}, version {key.version}"
    if current is None:
      return None, f"{said} is unknown: none was offered yet"
    m = current.manifest
    if (key.session, key.round_id, key.version) != m.key:
      return None, f"{said} is not the current one ({m})"
    if key.replica not in current.replicas:
      return None, f"{m} is not offered to rollout {key.replica}"
    return current, ""

  def _hold(self, active, done, wait_s: float | None = None) -> None:
    """Holds a call until done, for `wait_s`, or while the caller is there.

    Whoever hears that a caller is gone calls `wake`.
    """
    end = None if wait_s is None else time.monotonic() + wait_s
    while not done() and active():
      left = None if end is None else end - time.monotonic()
      if left is not None and left <= 0:
        return
      self._change.wait(left)
