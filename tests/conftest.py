"""Eight virtual CPU devices, and deterministic property tests."""

import os

# Read when JAX is first imported, so before any test module is.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis

# Derandomized: the same examples in every run. `make test-long` asks for more
# of them with --hypothesis-profile=long.
hypothesis.settings.register_profile(
  "quick",
  deadline=None,
  derandomize=True,
  max_examples=20,
  print_blob=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
  "long", parent=hypothesis.settings.get_profile("quick"), max_examples=400
)
hypothesis.settings.load_profile("quick")
