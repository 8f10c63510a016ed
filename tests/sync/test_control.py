"""Control messages over real sockets: server and board, clients in threads."""

import concurrent.futures
import contextlib
import threading
import time

import pytest

from laneweave.sync import rounds
from laneweave.sync.control import client as client_lib
from laneweave.sync.control import control_pb2
from laneweave.sync.control import server as server_lib
from laneweave.sync.transport import base
from laneweave.tests.sync import units

# Long enough for anything that is going to happen.
WAIT_S = 20
KEY = b"sixteen bytes, at the very least"


class Control:
  """A server, its board, clients, and threads for calls that wait."""

  def __init__(self, stack):
    self._stack = stack
    self.server = server_lib.ControlServer(
      bind_ip="127.0.0.1", port=0, auth_key=KEY
    )
    self.board = self.server.board
    self._threads = concurrent.futures.ThreadPoolExecutor(16)
    stack.callback(self._threads.shutdown)
    stack.callback(self.close)

  def client(self, replica="0", key=KEY):
    made = client_lib.ControlClient(self.server.address, replica, auth_key=key)
    self._stack.callback(made.close)
    return made

  def joined(self, replica="0", **changes):
    """A client whose rollout has joined."""
    client = self.client(replica)
    client.join(units.unit(replica=replica, **changes), WAIT_S)
    return client

  def start(self, call, *args):
    return self._threads.submit(call, *args)

  def offer(self, round_id=1, version=10, replicas=("0",)):
    manifest = units.manifest(self.board.session, round_id, version)
    self.board.offer(manifest, replicas)
    return manifest

  def close(self):
    # Nobody is left to hear that the session ended.
    self.board._units.clear()
    self.server.close()


@pytest.fixture
def control():
  with contextlib.ExitStack() as stack:
    yield Control(stack)


def staged(control):
  control.board.set_source(units.unit("trainer"))


def until(true):
  """Waits until something is true."""
  end = time.monotonic() + WAIT_S
  while not true():
    assert time.monotonic() < end
    time.sleep(0.01)


def report(client, manifest, outcome=rounds.PUBLISHED, **fields):
  client.report(
    control_pb2.ReportRequest(
      key=client.key(manifest), outcome=outcome, **fields
    )
  )


def test_a_round_from_joining_to_its_report(control):
  staged(control)
  client = control.joined()
  assert client.session == control.board.session
  assert [u.replica for u in control.board.wait_joined(1, 0)] == ["0"]
  offered = control.start(client.next_round, 0, WAIT_S)
  manifest = control.offer()
  assert offered.result(WAIT_S).key == manifest.key
  assert offered.result().variables == manifest.variables
  for name, words in manifest.fingerprints.items():
    assert offered.result().fingerprints[name].tolist() == words.tolist()
  received = control.start(client.receive, client.key(manifest), WAIT_S)
  assert control.board.begin(WAIT_S) == {"0"}
  control.board.landed("", 0.25)
  assert received.result(WAIT_S) == 0.25
  report(client, manifest, timings={"h2d": 0.5}, peak_rss_bytes=77)
  told = control.board.end(WAIT_S)["0"]
  assert (told.outcome, told.timings["h2d"]) == (rounds.PUBLISHED, 0.5)
  assert told.peak_rss_bytes == 77
  assert control.board.served("0") == 10


def test_a_rollout_that_joins_first_waits_for_the_first_version(control):
  client = control.client()
  joining = control.start(client.join, units.unit(), WAIT_S)
  with pytest.raises(concurrent.futures.TimeoutError):
    joining.result(0.2)
  staged(control)
  joining.result(WAIT_S)


def test_joining_is_idempotent_and_one_that_came_back_replaces_itself(control):
  staged(control)
  client = control.joined()
  client.join(units.unit(), WAIT_S)
  other = control.joined(control_address="127.0.0.1:3")
  (joined,) = control.board.wait_joined(1, 0)
  assert joined.control_address == "127.0.0.1:3"
  assert other.session == client.session


def test_joining_names_everything_that_does_not_agree(control):
  staged(control)
  with pytest.raises(base.MismatchError, match=r"`w`.*on the trainer") as found:
    control.joined(names=("b", "x"))
  assert len(found.value.problems) == 2
  assert control.board.wait_joined(1, 0) == []


def test_a_trainer_that_never_stages(control):
  start = time.monotonic()
  with pytest.raises(base.TransportError, match="it has nothing staged"):
    control.client().join(units.unit(), 1.0)
  assert time.monotonic() - start < WAIT_S / 2


def test_nobody_there():
  client = client_lib.ControlClient("127.0.0.1:1", "0")
  with pytest.raises(base.TransportError, match="nobody answered"):
    client.join(units.unit(), 0.5)
  client.close()
  with pytest.raises(base.TransportError, match=r"after close\(\)"):
    client.next_round(0, 1)


def test_a_silent_trainer_meets_the_deadline_of_the_answer(
  control, monkeypatch
):
  """A server that takes a call and says nothing: every call still ends."""
  monkeypatch.setattr(client_lib, "_ANSWER_S", 0.5)
  staged(control)
  client = control.joined()
  free = threading.Event()
  for name in ("join", "next_round", "report"):
    monkeypatch.setattr(control.board, name, lambda *_: free.wait(WAIT_S))
  try:
    with pytest.raises(base.TransportError, match="nobody answered"):
      client.join(units.unit(), 0.5)
    with pytest.raises(base.TransportError, match="did not answer in time"):
      report(client, units.manifest(client.session))
    with pytest.raises(base.TransportError, match="did not answer in time"):
      client.next_round(0, 0.2)
  finally:
    free.set()


def test_no_round_in_time(control):
  staged(control)
  with pytest.raises(base.TransportError, match="no round after 0 within"):
    control.joined().next_round(0, 0.3)


def test_rounds_reach_only_those_they_are_for(control):
  staged(control)
  first, second = control.joined("0"), control.joined("1")
  manifest = control.offer(replicas=["1"])
  with pytest.raises(base.TransportError, match="no round after"):
    first.next_round(0, 0.3)
  assert second.next_round(0, WAIT_S).key == manifest.key
  with pytest.raises(base.TransportError, match="is not offered to rollout 0"):
    first.receive(first.key(manifest), 5)


def test_strangers_and_old_sessions_have_to_join(control):
  staged(control)
  client = control.client()
  with pytest.raises(base.TransportError, match="join again"):
    client.next_round(0, WAIT_S)
  known = control.joined()
  known.session = "another"
  with pytest.raises(base.TransportError, match="join again"):
    known.next_round(0, WAIT_S)


@pytest.mark.parametrize(
  "change", [{"round_id": 6}, {"version": 49}, {"session": "another"}]
)
def test_stale_rounds_are_refused(control, change):
  staged(control)
  client = control.joined()
  current = control.offer(round_id=7, version=50)
  fields = {
    "session": current.session,
    "round_id": 7,
    "version": 50,
    **change,
  }
  stale = units.manifest(**fields)
  with pytest.raises(base.TransportError, match="not the current one"):
    client.receive(client.key(stale), WAIT_S)
  with pytest.raises(base.TransportError, match="not the current one"):
    report(client, stale)
  assert control.board.served("0") is None


def test_no_round_at_all(control):
  staged(control)
  client = control.joined()
  with pytest.raises(base.TransportError, match="none was offered yet"):
    report(client, units.manifest(client.session))


def test_a_round_that_began_lets_nobody_in(control):
  staged(control)
  first, second = control.joined("0"), control.joined("1")
  manifest = control.offer(replicas=["0", "1"])
  receiving = control.start(first.receive, first.key(manifest), WAIT_S)
  assert control.board.begin(0.3) == {"0"}
  with pytest.raises(base.TransportError, match="began without rollout 1"):
    second.receive(second.key(manifest), WAIT_S)
  with pytest.raises(base.TransportError, match="no round after"):
    second.next_round(0, 0.3)
  control.board.landed("", 0.0)
  receiving.result(WAIT_S)


def test_receiving_is_idempotent(control):
  staged(control)
  client = control.joined()
  manifest = control.offer()
  waiting = [
    control.start(client.receive, client.key(manifest), WAIT_S)
    for _ in range(2)
  ]
  assert control.board.begin(WAIT_S) == {"0"}
  control.board.landed("", 0.5)
  assert [w.result(WAIT_S) for w in waiting] == [0.5, 0.5]
  assert client.receive(client.key(manifest), WAIT_S) == 0.5


def test_a_failed_transfer_is_told(control):
  staged(control)
  client = control.joined()
  manifest = control.offer()
  receiving = control.start(client.receive, client.key(manifest), WAIT_S)
  control.board.begin(WAIT_S)
  control.board.landed("the link fell silent", 0.0)
  with pytest.raises(base.TransportError, match="the link fell silent"):
    receiving.result(WAIT_S)


def test_reports_are_idempotent_and_only_words_that_exist(control):
  staged(control)
  client = control.joined()
  manifest = control.offer()
  for _ in range(2):
    report(client, manifest, rounds.ABORTED, reason="x", mismatched=["w"])
  assert control.board.end(WAIT_S)["0"].mismatched == ("w",)
  with pytest.raises(base.TransportError, match="'fine' is no outcome"):
    report(client, manifest, "fine")


def test_a_rollout_that_leaves_is_not_waited_for(control):
  """The call of a rollout breaks off: the round ends without it."""
  staged(control)
  stays, leaves = control.joined("0"), control.joined("1")
  manifest = control.offer(replicas=["0", "1"])
  staying = control.start(stays.receive, stays.key(manifest), WAIT_S)
  left = control.start(leaves.receive, leaves.key(manifest), WAIT_S)
  assert control.board.begin(WAIT_S) == {"0", "1"}
  leaves.close()
  with pytest.raises(base.TransportError):
    left.result(WAIT_S)
  until(lambda: "1" in control.board._round.lost)
  start = time.monotonic()
  control.board.landed("", 0.1)
  staying.result(WAIT_S)
  report(stays, manifest)
  reports = control.board.end(60)
  assert time.monotonic() - start < WAIT_S
  assert reports["0"].outcome == rounds.PUBLISHED
  assert reports["1"].outcome == rounds.UNKNOWN
  # It has to join again.
  with pytest.raises(base.TransportError, match="join again"):
    control.client("1").next_round(0, 5)


def test_a_silent_rollout_is_unknown_if_the_bytes_reached_it(control):
  staged(control)
  clients = [control.joined(r) for r in ("0", "1")]
  manifest = control.offer(replicas=["0", "1"])
  waiting = control.start(clients[0].receive, clients[0].key(manifest), WAIT_S)
  assert control.board.begin(0.3) == {"0"}
  control.board.landed("", 0.1)
  waiting.result(WAIT_S)
  reports = control.board.end(0.3)
  assert reports["0"].outcome == rounds.UNKNOWN
  assert reports["1"].outcome == rounds.ABORTED
  assert "silent for" in reports["0"].reason


def test_every_waiting_call_ends_when_the_board_closes(control):
  staged(control)
  clients = [control.joined(str(i)) for i in range(2)]
  manifest = control.offer(replicas=["1"])
  waiting = control.start(clients[0].next_round, 0, WAIT_S)
  receiving = control.start(clients[1].receive, clients[1].key(manifest), 60)
  beginning = control.start(control.board.begin, 60)
  beginning.result(WAIT_S)
  ending = control.start(control.board.end, 60)
  time.sleep(0.2)
  start = time.monotonic()
  closing = control.start(control.server.close)
  assert waiting.result(WAIT_S) is None
  with pytest.raises(base.TransportError, match="gave it up"):
    receiving.result(WAIT_S)
  ending.result(WAIT_S)
  closing.result(WAIT_S)
  assert time.monotonic() - start < WAIT_S / 2


def test_a_round_under_way_ends_when_the_board_closes(control):
  """The session's own waits end too, not only those of calls."""
  staged(control)
  control.offer()
  beginning = control.start(control.board.begin, 60)
  with pytest.raises(concurrent.futures.TimeoutError):
    beginning.result(0.2)
  control.close()
  assert beginning.result(WAIT_S) == frozenset()


def test_a_call_that_breaks_off_frees_its_thread(control):
  staged(control)
  client = control.joined()
  manifest = control.offer()
  receiving = control.start(client.receive, client.key(manifest), 60)
  until(lambda: "0" in control.board._round.ready)
  client.close()
  with pytest.raises(base.TransportError):
    receiving.result(WAIT_S)
  until(lambda: "0" in control.board._round.lost)


def test_an_address_that_is_taken(control):
  port = int(control.server.address.rpartition(":")[2])
  with pytest.raises(base.TransportError, match="choose another port"):
    server_lib.ControlServer(bind_ip="127.0.0.1", port=port)
