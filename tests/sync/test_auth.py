"""Messages and manifests of those who do not hold the key."""

import contextlib
import dataclasses
import logging
import socket
import threading
import time

import grpc
import numpy as np
import pytest

from laneweave.sync import rounds
from laneweave.sync.control import auth, control_pb2, control_pb2_grpc, keys
from laneweave.sync.control import client as client_lib
from laneweave.sync.control import server as server_lib
from laneweave.tests.sync import units

KEY, OTHER = b"k" * 16, b"o" * 16
WAIT_S = 20


@contextlib.contextmanager
def serving(key=KEY):
  """A server with something staged."""
  server = server_lib.ControlServer(bind_ip="127.0.0.1", port=0, auth_key=key)
  server.board.set_source(units.unit("trainer"))
  try:
    yield server
  finally:
    server.board._units.clear()
    server.close()


@contextlib.contextmanager
def calling(address, key=KEY, replica="0"):
  client = client_lib.ControlClient(address, replica, auth_key=key)
  try:
    yield client
  finally:
    client.close()


def test_a_manifest_is_signed_and_any_change_shows():
  signed = auth.sign(units.manifest("s"), KEY)
  auth.check_manifest(signed, KEY)
  wire = rounds.manifest_to_wire(signed)
  auth.check_manifest(rounds.manifest_from_wire(wire), KEY)
  first, second = signed.variables
  prints = dict(signed.fingerprints)
  changes = {
    "session": "t",
    "round_id": 2,
    "version": 11,
    "seed": (1, 3),
    "fingerprints": {**prints, "w": np.array([1, 8], np.uint32)},
    "signature": signed.signature[:-1] + b"x",
  }
  for field, value in {
    "name": "c",
    "ordinal": 5,
    "shape": (4, 8),
    "dtype": "float16",
    "mesh_shape": (2, 2),
    "sharding_spec": ("", "fsdp"),
    "global_shard_indices": (1, 0, 2, 3),
  }.items():
    changed = dataclasses.replace(second, **{field: value})
    forged = dataclasses.replace(signed, variables=(first, changed))
    with pytest.raises(auth.AuthenticationError, match="or changed"):
      auth.check_manifest(forged, KEY)
  for field, value in changes.items():
    forged = dataclasses.replace(signed, **{field: value})
    with pytest.raises(auth.AuthenticationError, match="or changed"):
      auth.check_manifest(forged, KEY)


def test_a_manifest_without_a_signature_or_without_a_key():
  signed = auth.sign(units.manifest("s"), KEY)
  bare = dataclasses.replace(signed, signature=b"")
  with pytest.raises(auth.AuthenticationError, match="is not signed"):
    auth.check_manifest(bare, KEY)
  with pytest.raises(auth.AuthenticationError, match="has no `auth_key`"):
    auth.check_manifest(signed, None)
  with pytest.raises(auth.AuthenticationError, match="with another key"):
    auth.check_manifest(signed, OTHER)
  auth.check_manifest(bare, None)
  assert auth.sign(signed, None).signature == b""


def ask(gate_key, sequence=1, key=KEY, method="Join", **changes):
  question = auth.Question(
    method=method, session="s", caller=b"c" * 16, sequence=sequence
  )
  sealed = question.seal(key, auth.REQUEST, b"body")
  for field, value in changes.items():
    setattr(sealed, field, value)
  return gate_key.enter("Join", sealed)


@pytest.mark.parametrize(
  "changes",
  [
    {"key": OTHER},
    {"key": None},
    {"method": "Report"},
    {"body": b"Body"},
    {"caller": b"d" * 16},
    {"mac": b""},
    {"mac": b"x" * 32},
  ],
)
def test_a_forged_question_is_refused(changes):
  gate = auth.Gate(KEY, "s")
  with pytest.raises(auth.AuthenticationError, match="the request of Join"):
    ask(gate, **changes)
  sealed = auth.Question(
    method="Join", session="s", caller=b"c" * 16, sequence=1
  ).seal(KEY, auth.REQUEST, b"body")
  sealed.sequence = 2
  with pytest.raises(auth.AuthenticationError):
    gate.enter("Join", sealed)
  # None of these counted.
  assert ask(gate).sequence == 1


def test_a_question_of_another_session_or_an_answer_is_no_question():
  gate = auth.Gate(KEY, "t")
  with pytest.raises(auth.AuthenticationError):
    ask(gate)
  question = auth.Question(
    method="Join", session="s", caller=b"c" * 16, sequence=1
  )
  with pytest.raises(auth.AuthenticationError):
    auth.Gate(KEY, "s").enter("Join", question.seal(KEY, auth.REPLY, b"body"))
  with pytest.raises(auth.AuthenticationError):
    question.check(KEY, auth.REPLY, question.seal(KEY, auth.REQUEST, b"body"))


def test_every_question_is_taken_once():
  gate = auth.Gate(KEY, "s")
  # Some overtake others; a window of them is remembered, older ones are not
  # taken at all.
  order = [1, 3, 2, 70, 7, 69, 200, 137]
  for sequence in order:
    ask(gate, sequence)
  for sequence in [*order, 136, 6]:
    with pytest.raises(auth.AuthenticationError, match="played again"):
      ask(gate, sequence)
  assert ask(gate, 138).sequence == 138


def test_callers_are_bounded(monkeypatch):
  monkeypatch.setattr(auth, "_MOST_CALLERS", 2)
  gate = auth.Gate(KEY, "s")

  def enter(caller, sequence):
    gate.enter(
      "Join",
      auth.Question(
        method="Join", session="s", caller=caller, sequence=sequence
      ).seal(KEY, auth.REQUEST, b""),
    )

  enter(b"a", 1)
  enter(b"b", 1)
  with pytest.raises(auth.AuthenticationError, match="2 rollouts have called"):
    enter(b"c", 1)
  enter(b"a", 2)


@pytest.mark.parametrize(
  ("theirs", "ours", "said"),
  [
    (KEY, OTHER, "signed with another key"),
    (KEY, None, "is not signed"),
    (None, KEY, "this side has no `auth_key`"),
  ],
)
def test_sides_with_different_keys_do_not_join(theirs, ours, said):
  with serving(theirs) as server, calling(server.address, ours) as client:
    with pytest.raises(auth.AuthenticationError, match=said) as found:
      client.join(units.unit(), WAIT_S)
    assert "\n" not in str(found.value)
    assert server.board.wait_joined(1, 0) == []
    with pytest.raises(auth.AuthenticationError):
      client.next_round(0, WAIT_S)


class Impostor(control_pb2_grpc.WeightSyncServicer):
  """Answers as a trainer would, without its key."""

  def __init__(self, server, change):
    self._server, self._change = server, change

  def Hello(self, request, context):
    return self._server.Hello(request, context)

  def _forward(self, name, request, context):
    answer = getattr(self._server, name)(request, context)
    return self._change(answer)

  def Join(self, request, context):
    return self._forward("Join", request, context)

  def NextRound(self, request, context):
    return self._forward("NextRound", request, context)


def forged_body(answer):
  answer.body = control_pb2.JoinReply(session="mine").SerializeToString()
  return answer


def unsigned(answer):
  answer.mac = b""
  return answer


class Again:
  """Gives the first answer to every question."""

  def __init__(self):
    self.first = None

  def __call__(self, answer):
    self.first = self.first or answer
    return self.first


@pytest.mark.parametrize("change", [forged_body, unsigned, Again()])
def test_answers_of_someone_in_between(change):
  """A relay that has no key can drop messages and do nothing else."""
  with serving() as server:
    relay = grpc.server(_pool())
    control_pb2_grpc.add_WeightSyncServicer_to_server(
      Impostor(server, change), relay
    )
    port = relay.add_insecure_port("127.0.0.1:0")
    relay.start()
    try:
      with (
        calling(f"127.0.0.1:{port}") as client,
        pytest.raises(auth.AuthenticationError, match="the reply of"),
      ):
        client.join(units.unit(), WAIT_S)
        client.join(units.unit(), WAIT_S)
    finally:
      relay.stop(None).wait(5)


def _pool():
  import concurrent.futures

  return concurrent.futures.ThreadPoolExecutor(4)


class Tap(threading.Thread):
  """Passes bytes on to a server, and keeps those that went there."""

  def __init__(self, address):
    super().__init__(daemon=True)
    host, _, port = address.rpartition(":")
    self._server = (host, int(port))
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self.heard = b""

  def run(self):
    caller, _ = self._listener.accept()
    server = socket.create_connection(self._server)
    back = threading.Thread(target=self._back, args=(server, caller))
    back.start()
    with contextlib.suppress(OSError):
      while data := caller.recv(1 << 16):
        self.heard += data
        server.sendall(data)
    with contextlib.suppress(OSError):
      server.shutdown(socket.SHUT_RDWR)
    back.join(WAIT_S)
    server.close()
    caller.close()

  def _back(self, server, caller):
    with contextlib.suppress(OSError):
      while data := server.recv(1 << 16):
        caller.sendall(data)

  def replay(self):
    """Sends what was heard once more, and waits for what comes back."""
    with socket.create_connection(self._server, timeout=WAIT_S) as again:
      again.sendall(self.heard)
      again.settimeout(1)
      with contextlib.suppress(OSError):
        while again.recv(1 << 16):
          pass


def test_a_recorded_conversation_played_again_does_nothing(monkeypatch):
  with serving() as server:
    board = server.board
    tap = Tap(server.address)
    tap.start()
    with calling(tap.address) as client:
      client.join(units.unit(), WAIT_S)
      manifest = auth.sign(units.manifest(board.session), KEY)
      board.offer(manifest, ["0"])
      client.report(
        control_pb2.ReportRequest(
          key=client.key(manifest), outcome=rounds.PUBLISHED
        )
      )
    assert board.end(1)["0"].outcome == rounds.PUBLISHED
    taken = []
    for name in ("join", "next_round", "report"):
      monkeypatch.setattr(board, name, lambda *_: taken.append(1))
    refused = []
    enter = server._gate.enter

    def count(*args):
      try:
        return enter(*args)
      except auth.AuthenticationError as error:
        refused.append(str(error))
        raise

    monkeypatch.setattr(server._gate, "enter", count)
    assert b"published" in tap.heard
    tap.replay()
    end = time.monotonic() + WAIT_S
    while len(refused) < 2 and time.monotonic() < end:
      time.sleep(0.01)
    assert taken == []
    assert len(refused) >= 2
    assert all("played again" in r for r in refused)


def test_a_message_that_is_none():
  with serving() as server, calling(server.address) as client:
    client.join(units.unit(), WAIT_S)
    question = client._caller.ask("Join", client._said)
    sealed = question.seal(KEY, auth.REQUEST, b"\xff\xff\xff")
    with pytest.raises(grpc.RpcError, match="no JoinRequest"):
      client._stub.Join(sealed, timeout=WAIT_S)


@pytest.mark.parametrize("size", [0, 15, 4097, 1 << 20])
def test_a_key_of_a_wrong_size(tmp_path, size):
  path = tmp_path / "key"
  path.write_bytes(b"k" * size)
  with pytest.raises(ValueError, match=r"`--auth_key_file=.*16 to 4096"):
    keys.read(path)


def test_a_key_that_cannot_be_read(tmp_path):
  for path in (tmp_path, tmp_path / "absent"):
    with pytest.raises(
      ValueError, match=r"`--auth_key_file` .* cannot be read"
    ):
      keys.read(path)


def test_a_key_that_everybody_can_read(tmp_path, caplog):
  path = tmp_path / "key"
  path.write_bytes(b"k" * 16)
  path.chmod(0o644)
  with caplog.at_level(logging.WARNING):
    assert keys.read(path) == b"k" * 16
  assert "can be read by every user" in caplog.text
  caplog.clear()
  path.chmod(0o600)
  with caplog.at_level(logging.WARNING):
    keys.read(path)
  assert caplog.text == ""


def test_where_a_key_is_needed():
  for host in ("127.0.0.1", "::1", "[::1]", "localhost", "127.8.0.1"):
    keys.require(None, {"bind_ip": host})
  for host in ("10.0.0.1", "::", "example.org", ""):
    keys.require(KEY, {"bind_ip": host})
    with pytest.raises(ValueError, match=r"`bind_ip` .*`auth_key`"):
      keys.require(None, {"bind_ip": host})
  with pytest.raises(ValueError, match="must be bytes"):
    keys.require("k" * 16, {})
