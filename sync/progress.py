"""What a run has done so far, put together from both sides' events.

A side tells of what happens as events: plain dicts that also travel as lines
of JSON from a process to the launcher. `Run` collects them; the display and
the report are made from it.

| kind | from | fields |
| --- | --- | --- |
| plan | both | mesh, platform, transport, tensors, bytes, notes, dropped, leaves |
| listening | trainer | address |
| phase | both | round, phase |
| round | both | round, version, outcome, seconds, mismatched, reason |
| reference | rollout | tensors, mismatched |
| done | both | serving_version, peak_rss_bytes |
| failed | both | error, is_input, peak_rss_bytes |
"""

import dataclasses
from typing import Any, Protocol

Event = dict[str, Any]

# In the order in which they happen; then the time out of service.
SECONDS = (
  "convert",
  "d2h",
  "transfer",
  "h2d",
  "verify",
  "publish",
  "pause_s",
)


class Link(Protocol):
  """Where one side sends its events, and learns the trainer's address."""

  def emit(self, kind: str, **fields: Any) -> None:
    """Sends an event."""

  def address(self, timeout_s: float) -> str:
    """Waits for the address of the control service.

    Raises:
      TimeoutError: it did not come in time.
    """
    ...


# How `control.client` begins what it says of a trainer that went away.
_PEER_GONE = "the trainer at "


@dataclasses.dataclass(kw_only=True)
class Round:
  """One round, as far as it has come.

  Attributes:
    number: The round, from 1.
    version: Version of its weights, once known.
    phase: What is being done.
    outcome: "published", "aborted", ...; None while it runs.
    seconds: Seconds by name, see `SECONDS`.
    mismatched: Names of tensors whose fingerprints differ.
    reason: Why it was not published.
  """

  number: int
  version: int | None = None
  phase: str = ""
  outcome: str | None = None
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  mismatched: list[str] = dataclasses.field(default_factory=list)
  reason: str = ""


@dataclasses.dataclass(kw_only=True)
class Failure:
  """What ended a run.

  Attributes:
    side: Which side, or "launcher".
    error: One line.
    is_input: Flags or input are to blame, so that exit code 2 is due.
    is_death: The side's process ended before it could say why.
  """

  side: str
  error: str
  is_input: bool = False
  is_death: bool = False

  @property
  def notice_s(self) -> float:
    """Seconds that the other side gets to end by itself.

    What is wrong with the input is wrong for both. A side that died leaves the
    other waiting for it. Otherwise there is a report to wait for.
    """
    if self.is_input:
      return 0.0
    return 1.0 if self.is_death else 8.0


class Run:
  """The state of a run.

  Attributes:
    sides: Sides that were heard of.
    rounds: Rounds by number.
    transport: Name of the transport, once known; where the sides have different
      ones, the trainer's and the rollout's, joined by "+".
    address: Address of the control service, once known.
    meshes: Mesh and platform by side.
    plan: Fields of the plan event.
    reference: Fields of the reference event; None without a comparison.
    peak_rss_bytes: Peak resident memory by side.
    serving_version: Version that the rollout serves.
    finished: Sides that are done.
    failures: What went wrong, in the order it was told.
  """

  def __init__(self):
    self.sides: set[str] = set()
    self.rounds: dict[int, Round] = {}
    self.transport: str | None = None
    self._transports: dict[str, str] = {}
    self.address: str | None = None
    self.meshes: dict[str, str] = {}
    self.plan: Event = {}
    self.reference: Event | None = None
    self.peak_rss_bytes: dict[str, int] = {}
    self.serving_version: int | None = None
    self.finished: set[str] = set()
    self.failures: list[Failure] = []

  def apply(self, event: Event) -> None:
    """Takes an event in; `side` and `kind` say from whom and which."""
    side = event["side"]
    self.sides.add(side)
    if "peak_rss_bytes" in event:
      self.peak_rss_bytes[side] = event["peak_rss_bytes"]
    match event["kind"]:
      case "plan":
        self.plan = event
        self._transports[side] = event["transport"]
        # The trainer's first, whichever side told first.
        names = [self._transports[s] for s in sorted(self._transports)[::-1]]
        self.transport = "+".join(dict.fromkeys(names))
        self.meshes[side] = f"{event['mesh']} on {event['platform']}"
      case "listening":
        self.address = event["address"]
      case "phase":
        round_ = self._round(event)
        if round_.outcome is None:
          round_.phase = event["phase"]
      case "round":
        self._end_round(event)
      case "reference":
        self.reference = event
      case "done":
        self.finished.add(side)
      case "failed":
        self.failures.append(
          Failure(side=side, error=event["error"], is_input=event["is_input"])
        )
      case _:
        raise ValueError(f"unknown event {event!r}")
    if event.get("serving_version") is not None:
      self.serving_version = event["serving_version"]

  def _round(self, event: Event) -> Round:
    number = event["round"]
    return self.rounds.setdefault(number, Round(number=number))

  def _end_round(self, event: Event) -> None:
    """Both sides tell how a round ended; what either knows is kept."""
    round_ = self._round(event)
    round_.version = event["version"]
    round_.outcome = event["outcome"]
    round_.phase = ""
    round_.seconds.update(event["seconds"])
    round_.mismatched = sorted({*round_.mismatched, *event["mismatched"]})
    round_.reason = round_.reason or event.get("reason", "")

  def fail(self, side: str, error: str, **fields: bool) -> None:
    """Notes a failure that no event told of; see `Failure`."""
    self.failures.append(Failure(side=side, error=error, **fields))

  @property
  def cause(self) -> Failure | None:
    """What ended the run; other failures follow from it."""
    for field in ("is_input", "is_death"):
      for failure in self.failures:
        if getattr(failure, field):
          return failure
    # A rollout that says its trainer is gone may be heard before the trainer
    # says why.
    own = [f for f in self.failures if not f.error.startswith(_PEER_GONE)]
    return next(iter(own or self.failures), None)

  @property
  def published(self) -> int:
    """Number of rounds that were published."""
    return sum(r.outcome == "published" for r in self.rounds.values())
