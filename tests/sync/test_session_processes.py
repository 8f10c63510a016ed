"""Sessions in processes of their own; either side dies at any point."""

import signal
import socket

import pytest

from laneweave.tests.sync import peer as peer_lib

WAIT_S = peer_lib.WAIT_S
KEY = {"auth_key": b"sixteen bytes, at the very least"}


@pytest.fixture
def start():
  with peer_lib.peers() as start:
    yield start


def address(trainer):
  return trainer.call("get", "control_address")


def port(trainer):
  return int(address(trainer).rpartition(":")[2])


def pair(start, **options):
  """A trainer with version 1 and a rollout that serves it."""
  trainer = start("trainer", **KEY, **options)
  rollout = start("rollout", control_address=address(trainer), **KEY, **options)
  assert trainer.call("prepare", 1) == (1, 1)
  rollout.call("join")
  publish(trainer, [rollout], 1)
  return trainer, rollout


def publish(trainer, rollouts, version):
  """One good round."""
  trainer.start("serve", WAIT_S)
  for rollout in rollouts:
    rollout.start("whole_round")
  for rollout in rollouts:
    assert rollout.result() == version
  assert trainer.result()[0] == "published"
  for rollout in rollouts:
    rollout.call("check_serves", version)


def test_rounds_between_processes_leak_nothing(start):
  trainer, rollout = pair(start)
  seen = []
  for version in range(2, 26):
    trainer.call("prepare", version)
    publish(trainer, [rollout], version)
    if version % 8 == 1:
      seen.append([trainer.call("resources"), rollout.call("resources")])
  # Pools of threads fill up slowly; what leaks grows with every round.
  for first, last in zip(seen[0], seen[-1], strict=True):
    assert sum(last) - sum(first) < 8, seen


def test_either_side_is_killed_and_replaced_alone(start):
  """Between rounds and during them; what is served is the old version."""
  trainer, rollout = pair(start)
  # A rollout, between rounds.
  rollout.kill()
  assert rollout.gone(10)
  trainer.call("prepare", 2)
  rollout = start("rollout", control_address=address(trainer), **KEY)
  rollout.call("join")
  publish(trainer, [rollout], 2)

  # A rollout, while it waits for the bytes.
  trainer.call("prepare", 3)
  trainer.start("serve", 2)
  rollout.call("bind_next")
  rollout.kill()
  outcome, replicas = trainer.result()
  assert (outcome, replicas["0"][0]) == ("aborted", "aborted")
  rollout = start("rollout", control_address=address(trainer), **KEY)
  rollout.call("join")
  publish(trainer, [rollout], 3)

  # The trainer, between rounds.
  known = port(trainer)
  trainer.kill()
  assert trainer.gone(10)
  with pytest.raises(peer_lib.PeerError, match="gone or cannot be reached"):
    rollout.call("bind_next")
  rollout.call("check_serves", 3)
  trainer = start("trainer", control_port=known, **KEY)
  trainer.call("prepare", 4)
  rollout.call("join")
  publish(trainer, [rollout], 4)

  # The trainer, during a round: the bytes never come.
  trainer.call("prepare", 5)
  trainer.start("serve", WAIT_S)
  rollout.call("bind_next")
  trainer.kill(signal.SIGSTOP)
  rollout.start("receive")
  trainer.kill()
  with pytest.raises(peer_lib.PeerError, match="TransportError"):
    rollout.result()
  with pytest.raises(peer_lib.PeerError, match="gone or cannot be reached"):
    rollout.call("abort", "the trainer is gone")
  rollout.call("check_serves", 4)
  trainer = start("trainer", control_port=known, **KEY)
  trainer.call("prepare", 7)
  rollout.call("join")
  publish(trainer, [rollout], 7)


@pytest.mark.long
def test_a_trainer_that_stands_still_is_waited_for_so_long(start):
  trainer, rollout = pair(start)
  trainer.kill(signal.SIGSTOP)
  with pytest.raises(peer_lib.PeerError, match="did not answer in time"):
    rollout.call("bind_next", 1)
  rollout.call("check_serves", 1)
  trainer.kill(signal.SIGCONT)
  trainer.call("prepare", 2)
  publish(trainer, [rollout], 2)


def test_garbage_at_the_control_port(start):
  trainer, rollout = pair(start)
  known = port(trainer)
  for garbage in (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100000):
    with socket.create_connection(
      ("127.0.0.1", known), timeout=10
    ) as connected:
      try:
        connected.sendall(garbage)
      except ConnectionError:
        continue
  trainer.call("prepare", 2)
  publish(trainer, [rollout], 2)
