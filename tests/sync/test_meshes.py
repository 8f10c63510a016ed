"""Mesh strings, and the devices they ask for."""

import jax
import pytest

from laneweave.sync import meshes


def test_axes_keep_their_order_and_size():
  spec = meshes.parse("fsdp=2, tp=3", "rollout_mesh")
  assert spec.axes == (("fsdp", 2), ("tp", 3))
  assert spec.size == 6
  assert str(spec) == "fsdp=2,tp=3"


@pytest.mark.parametrize(
  "text",
  [
    "",
    "fsdp",
    "fsdp=",
    "=2",
    "fsdp=0",
    "fsdp=-1",
    "fsdp=two",
    "fsdp=2,",
    "fsdp=2,fsdp=2",
    "2=2",
    "fsdp=1.5",
    "fsdp=99999999999999999999",
    "a=1048576,b=1048576",
    "fsdp=²",
  ],
)
def test_anything_else_is_refused_by_the_flags_name(text):
  with pytest.raises(ValueError, match="`--trainer_mesh`") as caught:
    meshes.parse(text, "trainer_mesh")
  assert "\n" not in str(caught.value)


def test_a_mesh_is_the_first_devices_in_order():
  mesh = meshes.parse("x=2,y=2", "rollout_mesh").build(
    jax.devices()[3:], "rollout_mesh"
  )
  assert mesh.axis_names == ("x", "y")
  assert [d.id for d in mesh.devices.flat] == [3, 4, 5, 6]


def test_a_mesh_larger_than_the_devices_is_refused():
  spec = meshes.parse("fsdp=4,tp=4", "rollout_mesh")
  with pytest.raises(ValueError, match="needs 16 devices, and there are 8"):
    spec.build(jax.devices(), "rollout_mesh")


@pytest.mark.parametrize(
  ("flags", "wanted"),
  [
    (None, "--xla_force_host_platform_device_count=4"),
    ("--xla_a=1", "--xla_a=1 --xla_force_host_platform_device_count=4"),
    (
      "--xla_force_host_platform_device_count=2",
      "--xla_force_host_platform_device_count=4",
    ),
    (
      "--xla_force_host_platform_device_count=16",
      "--xla_force_host_platform_device_count=16",
    ),
  ],
)
def test_the_cpu_gets_at_least_as_many_devices(monkeypatch, flags, wanted):
  monkeypatch.setenv("XLA_FLAGS", flags or "")
  meshes.prepare_platform(4)
  assert meshes.os.environ["XLA_FLAGS"] == wanted


@pytest.mark.parametrize(
  ("chosen", "accelerator", "wanted"),
  [("", False, "cpu"), ("", True, ""), ("tpu", False, "tpu")],
)
def test_cpu_is_chosen_only_where_there_is_nothing_else(
  monkeypatch, chosen, accelerator, wanted
):
  monkeypatch.setenv("XLA_FLAGS", "")
  monkeypatch.setenv("JAX_PLATFORMS", chosen)
  monkeypatch.setattr(
    meshes.glob, "glob", lambda _: ["/dev/accel0"] if accelerator else []
  )
  meshes.prepare_platform(1)
  assert meshes.os.environ["JAX_PLATFORMS"] == wanted
