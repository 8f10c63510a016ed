"""Checkpoints: every form is read exactly, and what is not one is refused."""

import io
import json
import pickle
import struct
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from laneweave.sync import checkpoint, flags

RNG = np.random.default_rng(0)
WEIGHTS = {
  "decoder.layers.mlp.wo.kernel": RNG.standard_normal((6, 2, 5), np.float32),
  "decoder.decoder_norm.scale": RNG.standard_normal(7).astype(
    ml_dtypes.bfloat16
  ),
  "token_embedder.embedding": RNG.standard_normal((3, 4)).astype(np.float16),
  "step": np.array(3, np.int32),
}


def check_equal(opened, expected):
  assert opened.shapes.keys() == expected.keys()
  for name, x in expected.items():
    assert opened.shapes[name].shape == x.shape
    assert opened.shapes[name].dtype == x.dtype
    found = opened.read(name)
    assert found.dtype == x.dtype
    assert found.flags.c_contiguous
    assert found.shape == x.shape
    assert found.tobytes() == np.ascontiguousarray(x).tobytes(), name


def read_all(path):
  with checkpoint.open_checkpoint(path) as opened:
    for name in opened.shapes:
      opened.read(name)


def refused(path, *said):
  with pytest.raises(ValueError, match="`--checkpoint`") as caught:
    read_all(path)
  text = str(caught.value)
  assert "\n" not in text
  for part in said:
    assert part in text


def npz(path, members, **options):
  with zipfile.ZipFile(path, "w", **options) as archive:
    for name, data in members.items():
      archive.writestr(name, data)
  return path


def npy(array, **options):
  file = io.BytesIO()
  np.lib.format.write_array(file, array, **options)
  return file.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read_bit_for_bit(tmp_path, save):
  path = tmp_path / "x.npz"
  save(path, **WEIGHTS)
  with checkpoint.open_checkpoint(path) as opened:
    check_equal(opened, WEIGHTS)


def test_the_bundled_checkpoint_is_small_and_readable():
  assert flags.BUNDLED.stat().st_size < 2 << 20
  with checkpoint.open_checkpoint(flags.BUNDLED) as opened:
    assert opened.read("decoder.layers.moe_block.wo").shape == (4, 4, 192, 32)


def test_npz_orders_and_byte_orders_are_made_native(tmp_path):
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  path = npz(
    tmp_path / "x.npz",
    {"f.npy": npy(np.asfortranarray(x)), "b.npy": npy(x.astype(">f4"))},
  )
  with checkpoint.open_checkpoint(path) as opened:
    check_equal(opened, {"f": x, "b": x})


def test_npz_float8_is_refused_since_its_name_is_lost(tmp_path):
  path = tmp_path / "x.npz"
  np.savez(path, w=np.ones(3, ml_dtypes.float8_e4m3fn))
  refused(path, "'w.npy'", "safetensors")


@pytest.mark.parametrize("cut", [0, 1, 10, 200, 900])
def test_a_truncated_npz_is_refused(tmp_path, cut):
  path = tmp_path / "x.npz"
  np.savez_compressed(path, **WEIGHTS)
  path.write_bytes(path.read_bytes()[:cut])
  refused(path, "truncated")


def test_a_flipped_byte_in_an_npz_is_found(tmp_path):
  path = tmp_path / "x.npz"
  np.savez(path, w=np.arange(1000, dtype=np.float32))
  data = bytearray(path.read_bytes())
  data[2000] ^= 1
  path.write_bytes(data)
  refused(path, "damaged", "w.npy")


class Bomb:
  def __reduce__(self):
    return (pytest.fail, ("unpickled",))


def test_pickles_are_never_loaded(tmp_path):
  objects = np.array([Bomb()], dtype=object)
  path = npz(tmp_path / "x.npz", {"w.npy": npy(objects, allow_pickle=True)})
  refused(path, "'w.npy'")
  path = npz(tmp_path / "y.npz", {"w.npy": pickle.dumps(Bomb())})
  refused(path, "'w.npy'")


@pytest.mark.parametrize(
  "name",
  [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a..b",
    ".a",
    "a b",
    "a\nb",
    "",
    "ä",
    "a." * 300 + "b",
  ],
)
def test_names_that_are_no_dotted_paths_are_refused(tmp_path, name):
  path = npz(tmp_path / "x.npz", {f"{name}.npy": npy(np.ones(2, np.float32))})
  refused(path, "dotted paths")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice_is_refused(tmp_path):
  path = tmp_path / "x.npz"
  with zipfile.ZipFile(path, "w") as archive:
    for _ in range(2):
      archive.writestr("w.npy", npy(np.ones(2, np.float32)))
  refused(path, "`w` twice")


def test_an_archive_of_other_files_is_refused(tmp_path):
  refused(npz(tmp_path / "x.npz", {"readme.txt": b"hello"}), "readme.txt")


def test_a_bomb_is_refused_before_it_unpacks(tmp_path):
  path = tmp_path / "x.npz"
  np.savez_compressed(path, w=np.zeros(80 << 20, np.uint8))
  refused(path, "do not compress like that")


def test_a_header_that_claims_more_than_is_there_is_refused(tmp_path):
  data = npy(np.ones(4, np.float32)).replace(b"(4,)", b"(9,)")
  refused(npz(tmp_path / "x.npz", {"w.npy": data}), "does not fill")


def test_an_empty_array_is_refused(tmp_path):
  path = npz(tmp_path / "x.npz", {"w.npy": npy(np.ones((0, 3), np.float32))})
  refused(path, "holds nothing")


def test_safetensors_file_is_read_bit_for_bit(tmp_path):
  path = tmp_path / "x.safetensors"
  save_file(WEIGHTS, path)
  with checkpoint.open_checkpoint(path) as opened:
    check_equal(opened, WEIGHTS)


def two_files(folder, index):
  names = sorted(WEIGHTS)
  parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
  for file, held in parts.items():
    save_file({n: WEIGHTS[n] for n in held}, folder / file)
  file_of = {n: file for file, held in parts.items() for n in held}
  if index:
    write_index(folder, file_of)
  return file_of


def write_index(folder, file_of):
  text = json.dumps({"weight_map": file_of})
  (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("index", [True, False])
def test_safetensors_directory_is_one_checkpoint(tmp_path, index):
  two_files(tmp_path, index)
  with checkpoint.open_checkpoint(tmp_path) as opened:
    check_equal(opened, WEIGHTS)


def test_with_an_index_other_files_are_left_alone(tmp_path):
  two_files(tmp_path, index=True)
  save_file({"old": np.ones(2, np.float32)}, tmp_path / "c.safetensors")
  with checkpoint.open_checkpoint(tmp_path) as opened:
    check_equal(opened, WEIGHTS)


def test_an_index_that_differs_from_its_files_is_refused(tmp_path):
  file_of = two_files(tmp_path, index=True)
  write_index(tmp_path, {**file_of, "extra": "a.safetensors"})
  refused(tmp_path, "differ in 1 arrays", "`extra`")
  write_index(tmp_path, {**file_of, "step": "gone.safetensors"})
  refused(tmp_path, "lacks 1 of", "gone.safetensors")


@pytest.mark.parametrize(
  "name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", 3]
)
def test_an_index_names_files_of_its_own_directory_only(tmp_path, name):
  two_files(tmp_path, index=False)
  write_index(tmp_path, {"w": name})
  refused(tmp_path, "its own directory")


@pytest.mark.parametrize(
  "text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 9999]
)
def test_an_index_of_another_form_is_refused(tmp_path, text):
  two_files(tmp_path, index=False)
  (tmp_path / "model.safetensors.index.json").write_text(text)
  refused(tmp_path, "is no safetensors index")


def test_a_name_in_two_files_is_refused(tmp_path):
  for file in ("a", "b"):
    save_file({"w": np.ones(2, np.float32)}, tmp_path / f"{file}.safetensors")
  refused(tmp_path, "`w` twice")


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"\0" * 7,
    struct.pack("<Q", 1 << 60) + b"{}",
    struct.pack("<Q", 2) + b"{}garbage",
    struct.pack("<Q", 8) + b'{"a": 1}',
  ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path, data):
  path = tmp_path / "x.safetensors"
  path.write_bytes(data)
  refused(path)


def test_safetensors_float8_is_refused_when_it_is_read(tmp_path):
  path = tmp_path / "x.safetensors"
  save_file({"w": np.ones(3, ml_dtypes.float8_e4m3fn)}, path)
  refused(path, "float8_e4m3fn")


def test_orbax_weights_are_read_out_of_a_training_state(tmp_path):
  weights = {
    "layers": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)},
    "norm": jnp.arange(4, dtype=jnp.bfloat16),
  }
  state = {
    "params": {"params": {"decoder": weights}},
    "opt_state": [{"mu": np.zeros(2, np.float32)}],
    "step": np.int32(3),
  }
  step = tmp_path / "5"
  ocp.PyTreeCheckpointer().save(step / "items", state)
  with checkpoint.open_checkpoint(step) as opened:
    check_equal(
      opened,
      {
        "params.params.decoder.layers.w": weights["layers"]["w"],
        "params.params.decoder.norm": np.asarray(weights["norm"]),
      },
    )


def test_a_damaged_orbax_directory_is_refused(tmp_path):
  (tmp_path / "_METADATA").write_text("{")
  refused(tmp_path, "Orbax")


def test_what_is_of_no_known_kind_is_refused(tmp_path):
  refused(tmp_path / "gone.npz", "no such file")
  refused(tmp_path, "without an Orbax checkpoint")
  (tmp_path / "weights.bin").write_bytes(b"x")
  refused(tmp_path / "weights.bin", "no known kind")
