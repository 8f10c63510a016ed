"""Flags are checked, and say their names when they are wrong."""

import pathlib

from absl import flags as absl_flags
from absl.testing import flagsaver
import pytest

from laneweave.sync import flags


@pytest.fixture
def read():
  """Parses and checks a command line; the flags' values are put back."""

  def parse(*arguments):
    return flags.read(absl_flags.FLAGS(["laneweave-sync", *arguments]))

  with flagsaver.flagsaver():
    yield parse


def test_defaults_are_those_of_the_main_job(read):
  options = read()
  assert str(options.trainer_mesh) == "fsdp=4"
  assert str(options.rollout_mesh) == "fsdp=2,tp=2"
  assert options.checkpoint == flags.BUNDLED
  assert (options.rounds, options.verify, options.role) == (
    3,
    "reference",
    "both",
  )
  assert (options.transport, options.kernel_backend) == ("auto", "auto")
  assert options.controller_address is None
  assert options.weight_dtype == "bfloat16"


def test_values_are_taken(read):
  options = read(
    "--checkpoint=a.npz",
    "--sharding_rules=rollout:mlp=fsdp",
    "--moe_lane_size=128",
    "--role=rollout",
    "--weight_sync_debug",
  )
  assert options.checkpoint == pathlib.Path("a.npz")
  assert options.rules["rollout"].of("mlp_moe") == ("fsdp",)
  assert options.moe_lane_size == 128
  assert options.weight_sync_debug
  assert options.controller_address == f"127.0.0.1:{flags.DEFAULT_PORT}"


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--rounds=0"], "`--rounds`"),
    (["--trainer_mesh=fsdp"], "`--trainer_mesh`"),
    (["--rollout_mesh="], "`--rollout_mesh`"),
    (["--sharding_rules=mlp"], "`--sharding_rules`"),
    (["--moe_lane_size=64"], "`--moe_lane_size`"),
    (["--parallelism=0"], "`--parallelism`"),
    (["--parallelism=100000"], "`--parallelism`"),
    (["--timeout_s=nan"], "`--timeout_s`"),
    (["--timeout_s=0"], "`--timeout_s`"),
    (["--bind_ip=here"], "`--bind_ip`"),
    (["--bind_ip=10.0.0.1"], "`--bind_ip` 10.0.0.1 can be reached"),
    (["--auth_key_file=/none"], "`--auth_key_file` /none cannot be read"),
    (["--auth_key_file=/dev/null"], "`--auth_key_file=/dev/null` has 0 bytes"),
    (
      ["--role=rollout", "--controller_address=trainer:4711"],
      "`--controller_address` trainer can be reached",
    ),
    (["--controller_address=here"], "`--controller_address`"),
    (["--controller_address=h:65536"], "`--controller_address`"),
    (["--role=rollout", "--controller_address=h:0"], "`--controller_address`"),
    (["--role=trainer", "--transport=local"], "`--transport=local`"),
    (
      ["--transport=local", "--use_raiden_ffi=true"],
      "`--use_raiden_ffi=true` is one of Raiden's",
    ),
    (["--simulated_gbps=1"], "`--simulated_gbps` 1 is"),
    (["--simulated_gbps=-1", "--use_raiden_ffi=true"], "`--simulated_gbps`"),
    (["--simulated_gbps=nan", "--use_raiden_ffi=true"], "`--simulated_gbps`"),
    (["--checkpoint="], "`--checkpoint`"),
    (["--maxtext_config=a\0b"], "`--maxtext_config`"),
  ],
)
def test_a_wrong_value_is_refused_by_the_flags_name(read, arguments, said):
  with pytest.raises(ValueError, match="`--") as caught:
    read(*arguments)
  assert said in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("value", "trainer", "rollout"),
  [
    ("auto", None, None),
    ("true", True, True),
    ("false", False, False),
    ("trainer", True, False),
    ("rollout", False, True),
  ],
)
def test_ffi_is_asked_of_either_side(read, value, trainer, rollout):
  options = read(f"--use_raiden_ffi={value}")
  assert (options.ffi("trainer"), options.ffi("rollout")) == (trainer, rollout)


@pytest.mark.parametrize(
  "argument",
  [
    "--verify=maybe",
    "--transport=pigeon",
    "--use_raiden_ffi=maybe",
    "--kernel_backend=gpu",
    "--rounds=x",
  ],
)
def test_a_value_that_is_none_of_the_choices_is_refused(read, argument):
  with pytest.raises(absl_flags.Error):
    read(argument)


def test_every_flag_has_help_with_its_default():
  text = flags.describe()
  for flag in absl_flags.FLAGS.flags_by_module_dict()[flags.__name__]:
    assert f"--{flag.name}: " in text
    assert len(flag.help) > 20
  assert max(map(len, text.splitlines())) <= 80
