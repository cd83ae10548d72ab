"""Packed weights kept between runs: served when right, silently packed again when not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import CapacityError, ModelError
from headstart.formats.base import Tensor, ends_crc, make_tensor

pytest.importorskip("headstart.kernels.native._native")

from headstart.kernels.backends import native
from headstart.kernels.native import packing
from headstart.kernels.native.packing import PackedCache, key_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


POOL = packing.ThreadPool(1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 1000)
    return path


def tensors(count: int = 3) -> list[Tensor]:
    values = np.random.default_rng(7).standard_normal((count, 40, 70), dtype=np.float32)
    return [make_tensor(f"w{i}", (40, 70), "F32", values[i].reshape(-1).view(np.uint8)) for i in range(count)]


def filled(source: Path, these: list[Tensor]) -> PackedCache:
    cache = PackedCache.open(key_of([source], None))
    for tensor in these:
        cache.put(tensor, packing.pack(tensor, POOL))
    cache.save()
    return cache


def served(source: Path, these: list[Tensor], quantization: str | None = None) -> list[bool]:
    """Which tensors a new process would get, with their values checked."""
    cache = PackedCache.open(key_of([source], quantization))
    found = [cache.get(tensor) for tensor in these]
    for tensor, matrix in zip(these, found, strict=True):
        if matrix:
            np.testing.assert_array_equal(packing.dequantize(matrix, POOL), tensor.float32())
    return [matrix is not None for matrix in found]


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_round_trip(source: Path, folder: Path) -> None:
    these = tensors()
    assert served(source, these) == [False] * 3
    filled(source, these)
    assert served(source, these) == [True] * 3 and served(source, these, "int8") == [False] * 3
    matrix = PackedCache.open(key_of([source], None)).get(these[0])
    only_file(folder).unlink()
    np.testing.assert_array_equal(packing.dequantize(matrix, POOL), these[0].float32())  # still mapped


def test_quantized_forms_come_back(source: Path) -> None:
    tensor = tensors(1)[0]
    for quantization in ("int8", "int4"):
        cache = PackedCache.open(key_of([source], quantization))
        packed = cache.put(tensor, packing.pack(tensor, POOL, quantization))
        cache.save()
        found = PackedCache.open(key_of([source], quantization)).get(tensor)
        for name in ("kind", "rows", "cols", "group", "zero", "scales", "offsets", "levels", "num_bytes"):
            assert getattr(found, name) == getattr(packed, name)
        np.testing.assert_array_equal(found.data, packed.data)


def test_what_was_there_stays(source: Path) -> None:
    first, second, third = tensors()
    filled(source, [first])
    filled(source, [third])
    assert served(source, [first, second, third]) == [True, False, True]


def test_same_name_other_rows(source: Path) -> None:
    """Rows taken from a tensor carry its name, and may be as many."""
    tensor = tensors(1)[0]
    filled(source, [tensor])
    assert served(source, [tensor.take_rows(rows) for rows in (np.arange(39, -1, -1), np.arange(3))]) == [False] * 2


def test_nothing_new_writes_nothing(source: Path, folder: Path) -> None:
    filled(source, tensors())
    before = only_file(folder).stat().st_ino
    filled(source, [])
    assert only_file(folder).stat().st_ino == before


def test_changed_checkpoint(source: Path, folder: Path) -> None:
    these = tensors()
    filled(source, these)
    os.utime(source, ns=(1, 1))
    assert served(source, these) == [False] * 3
    filled(source, these[:1])
    assert served(source, these) == [True, False, False]
    only_file(folder)  # in the place of the old one


@pytest.mark.parametrize("name", ["LAYOUT", "__version__"])
def test_other_version(source: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    these = tensors()
    filled(source, these)
    monkeypatch.setattr(packing, name, "other")
    assert served(source, these) == [False] * 3
    filled(source, these)
    assert served(source, these) == [True] * 3


@pytest.mark.parametrize("size", [0, 7, 200, 4096, -1])
def test_cut_off(source: Path, folder: Path, size: int) -> None:
    these = tensors()
    filled(source, these)
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:size])
    assert served(source, these) == [False] * 3
    filled(source, these)
    assert served(source, these) == [True] * 3


def test_damage(source: Path, folder: Path) -> None:
    """In the header nothing is served; in a matrix that one is not, and is not carried over."""
    these = tensors()
    filled(source, these)
    path = only_file(folder)
    good = bytearray(path.read_bytes())
    for at in (0, 9, 13, 60):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert served(source, these) == [False] * 3
    path.write_bytes(good[:-8192] + bytes(8192))
    assert served(source, these) == [True, True, False]
    filled(source, these[:1])
    assert served(source, these) == [True, True, False]
    path.write_text('{"not": "ours"}')
    assert served(source, these) == [False] * 3


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_unwritable_folder(source: Path, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")  # root may write everywhere else
    these = tensors()
    filled(source, these)
    assert served(source, these) == [False] * 3


def test_a_missing_checkpoint_and_no_room_leave_nothing(
    tmp_path: Path, folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_of([tmp_path / "nothing"], None) is None
    filled(tmp_path / "nothing", tensors())
    assert not folder.exists()
    monkeypatch.setattr(packing, "_MAX_BYTES", 10_000)
    filled(source, tensors())
    assert not list(folder.iterdir())


def test_oldest_files_go(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MAX_FILES", 2)
    folder.mkdir(parents=True)
    stale = folder / ".dead.tmp"
    stale.write_bytes(b"half")
    os.utime(stale, (1, 1))
    these, sources = tensors(1), [tmp_path / f"{i}.gguf" for i in range(3)]
    for age, source in enumerate(sources):
        source.write_bytes(b"x")
        filled(source, these)
        for file in folder.glob("*.pack"):
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
        assert age == 0 or served(sources[0], these) == [True]  # its use makes it new
    assert [served(source, these) for source in sources] == [[True], [False], [True]] and not stale.exists()


def test_weights_beyond_the_memory_go_to_the_file_one_by_one(source: Path, folder: Path) -> None:
    """They are mapped when `put` returns; the file serves the next process; another head's weights stay in memory."""
    these, cache = tensors(), PackedCache.open(key_of([source], None), in_file=True)
    packed = [packing.pack(tensor, POOL) for tensor in these]
    mapped = [cache.put(tensor, matrix) for tensor, matrix in zip(these[:2], packed, strict=False)]
    assert [path.suffix for path in folder.iterdir()] == [".tmp"] and cache.mapped_bytes == 2 * packed[0].num_bytes
    assert cache.save() and served(source, these) == [True, True, False]
    only_file(folder)
    for own, matrix in zip(mapped, packed, strict=False):
        assert own is not matrix and own.data.tobytes() == matrix.data.tobytes()
    assert cache.put(these[2], packed[2]) is packed[2]


def test_a_window_holds_several_matrices(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    these = tensors(5)
    monkeypatch.setattr(packing, "_WINDOW", 30_000)  # two matrices of 16 kB do not fit, one of 10 kB does
    cache = PackedCache.open(key_of([source], None), in_file=True)
    mapped = [cache.put(tensor, packing.pack(tensor, POOL)) for tensor in these]
    cache.save()
    assert served(source, these) == [True] * 5
    for tensor, matrix in zip(these, mapped, strict=True):
        np.testing.assert_array_equal(packing.dequantize(matrix, POOL), tensor.float32())


def test_a_disk_without_room_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    (tensor,) = tensors(1)
    monkeypatch.setattr(packing._Writer, "add", full)
    cache = PackedCache.open(key_of([source], None), in_file=True)
    with pytest.raises(CapacityError, match=r"do not fit into memory, and not into .* No space left"):
        cache.put(tensor, packing.pack(tensor, POOL))


@pytest.mark.parametrize("in_file", [False, True])
def test_a_tiny_mixture_of_experts_from_a_file(
    tmp_path: Path, folder: Path, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are those of weights in memory, before and after a deletion; a cut file is an error of one line."""
    monkeypatch.setattr(native, "MAX_WEIGHTS", 0.0 if in_file else 0.7)
    model = write_tiny("qwen3_moe", tmp_path / "model")
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=1)

    def written(llm: LLM) -> list[tuple[int, ...]]:
        (found,) = llm.generate(["a b"], params)
        return [(*found.token_ids, *(place.logprob for place in found.logprobs))]

    options = {"backend": "native", "depth": 0, "max_model_len": 64}
    with LLM(str(model), EngineConfig(**options, max_num_batched_tokens=3)) as llm:
        expected = written(llm)
    with LLM(str(model), EngineConfig(**options)) as llm:
        path = only_file(folder)
        assert written(llm) == expected
        size = path.stat().st_size
        os.truncate(path, size - 4096)
        with pytest.raises(ModelError, match=r"was cut to .* while its weights were in use"):
            llm.generate(["a b"], params)
        os.truncate(path, size)
        path.unlink()
    with LLM(str(model), EngineConfig(**options)) as llm:
        assert written(llm) == expected


@pytest.mark.slow
def test_concurrent_writers(source: Path, folder: Path) -> None:
    """Readers see a whole file at any moment while two processes write it again and again."""
    these = tensors()
    filled(source, these)
    command = [sys.executable, "-P", "-c", _WRITER, str(Path(__file__).parent), str(source)]
    writers = [subprocess.Popen(command) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        assert served(source, these) == [True] * 3
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0] and served(source, these) == [True] * 3
    only_file(folder)


_WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
import test_packed_cache as own
for _ in range(20):
    own.filled(Path(sys.argv[2]), own.tensors())
"""


def test_rows_that_lie_apart_have_the_checksum_of_their_bytes() -> None:
    """A view of every other byte, such as one tap of a convolution of two."""
    data = np.arange(20_000, dtype=np.uint8)
    assert ends_crc(data[::2]) == ends_crc(data[::2].copy()) != ends_crc(data[1::2])
    assert make_tensor("w", (2, 2), "I8", data[:8:2]).fingerprint() == ends_crc(data[:8:2].copy())
