"""Cache of packed weights: valid files are used in later runs, invalid files are silently packed again."""

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


def served_tensors(source: Path, these: list[Tensor], quantization: str | None = None) -> list[bool]:
    """Which tensors a new process would get from the cache; their values are checked."""
    cache = PackedCache.open(key_of([source], quantization))
    found = [cache.get(tensor) for tensor in these]
    for tensor, matrix in zip(these, found, strict=True):
        if matrix:
            np.testing.assert_array_equal(packing.dequantize(matrix, POOL), tensor.float32())
    return [matrix is not None for matrix in found]


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_packed_weights_round_trip(source: Path, folder: Path) -> None:
    these = tensors()
    assert served_tensors(source, these) == [False] * 3
    filled(source, these)
    assert served_tensors(source, these) == [True] * 3 and served_tensors(source, these, "int8") == [False] * 3
    matrix = PackedCache.open(key_of([source], None)).get(these[0])
    only_file(folder).unlink()
    np.testing.assert_array_equal(packing.dequantize(matrix, POOL), these[0].float32())  # still mapped


def test_quantized_weights_round_trip(source: Path) -> None:
    tensor = tensors(1)[0]
    for quantization in ("int8", "int4"):
        cache = PackedCache.open(key_of([source], quantization))
        packed = cache.put(tensor, packing.pack(tensor, POOL, quantization))
        cache.save()
        found = PackedCache.open(key_of([source], quantization)).get(tensor)
        for name in ("kind", "rows", "cols", "group", "zero", "scales", "offsets", "levels", "num_bytes"):
            assert getattr(found, name) == getattr(packed, name)
        np.testing.assert_array_equal(found.data, packed.data)


def test_earlier_entries_are_kept(source: Path) -> None:
    first, second, third = tensors()
    filled(source, [first])
    filled(source, [third])
    assert served_tensors(source, [first, second, third]) == [True, False, True]


def test_row_subsets_are_not_served_for_their_source(source: Path) -> None:
    """Rows taken from a tensor have its name, and may have its number of rows."""
    tensor = tensors(1)[0]
    filled(source, [tensor])
    assert (
        served_tensors(source, [tensor.take_rows(rows) for rows in (np.arange(39, -1, -1), np.arange(3))])
        == [False] * 2
    )


def test_unchanged_cache_is_not_written(source: Path, folder: Path) -> None:
    filled(source, tensors())
    before = only_file(folder).stat().st_ino
    filled(source, [])
    assert only_file(folder).stat().st_ino == before


def test_changed_checkpoint_is_packed_again(source: Path, folder: Path) -> None:
    these = tensors()
    filled(source, these)
    os.utime(source, ns=(1, 1))
    assert served_tensors(source, these) == [False] * 3
    filled(source, these[:1])
    assert served_tensors(source, these) == [True, False, False]
    only_file(folder)  # replaces the old file


@pytest.mark.parametrize("name", ["LAYOUT", "__version__"])
def test_other_versions_are_packed_again(source: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    these = tensors()
    filled(source, these)
    monkeypatch.setattr(packing, name, "other")
    assert served_tensors(source, these) == [False] * 3
    filled(source, these)
    assert served_tensors(source, these) == [True] * 3


@pytest.mark.parametrize("size", [0, 7, 200, 4096, -1])
def test_truncated_file_is_packed_again(source: Path, folder: Path, size: int) -> None:
    these = tensors()
    filled(source, these)
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:size])
    assert served_tensors(source, these) == [False] * 3
    filled(source, these)
    assert served_tensors(source, these) == [True] * 3


def test_damaged_entries_are_not_served(source: Path, folder: Path) -> None:
    """Damage in the header drops the file; damage in a matrix drops that matrix, which is not carried over."""
    these = tensors()
    filled(source, these)
    path = only_file(folder)
    good = bytearray(path.read_bytes())
    for at in (0, 9, 13, 60):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert served_tensors(source, these) == [False] * 3
    path.write_bytes(good[:-8192] + bytes(8192))
    assert served_tensors(source, these) == [True, True, False]
    filled(source, these[:1])
    assert served_tensors(source, these) == [True, True, False]
    path.write_text('{"not": "ours"}')
    assert served_tensors(source, these) == [False] * 3


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_unwritable_folder_is_tolerated(source: Path, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")  # root may write into any folder
    these = tensors()
    filled(source, these)
    assert served_tensors(source, these) == [False] * 3


def test_missing_checkpoint_or_full_cache_leaves_no_file(
    tmp_path: Path, folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_of([tmp_path / "nothing"], None) is None
    filled(tmp_path / "nothing", tensors())
    assert not folder.exists()
    monkeypatch.setattr(packing, "_MAX_BYTES", 10_000)
    filled(source, tensors())
    assert not list(folder.iterdir())


def test_oldest_files_are_removed(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert age == 0 or served_tensors(sources[0], these) == [True]  # use refreshes its age
    assert [served_tensors(source, these) for source in sources] == [[True], [False], [True]] and not stale.exists()


def test_weights_beyond_memory_are_written_and_mapped_one_by_one(source: Path, folder: Path) -> None:
    """Weights are mapped when `put` returns, and the file serves the next process; weights of another head stay in
    memory."""
    these, cache = tensors(), PackedCache.open(key_of([source], None), in_file=True)
    packed = [packing.pack(tensor, POOL) for tensor in these]
    mapped = [cache.put(tensor, matrix) for tensor, matrix in zip(these[:2], packed, strict=False)]
    assert [path.suffix for path in folder.iterdir()] == [".tmp"] and cache.mapped_bytes == 2 * packed[0].num_bytes
    assert cache.save() and served_tensors(source, these) == [True, True, False]
    only_file(folder)
    for own, matrix in zip(mapped, packed, strict=False):
        assert own is not matrix and own.data.tobytes() == matrix.data.tobytes()
    assert cache.put(these[2], packed[2]) is packed[2]


def test_one_mapping_holds_several_matrices(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    these = tensors(5)
    monkeypatch.setattr(packing, "_WINDOW", 30_000)  # two matrices of 16 kB do not fit, one of 10 kB does
    cache = PackedCache.open(key_of([source], None), in_file=True)
    mapped = [cache.put(tensor, packing.pack(tensor, POOL)) for tensor in these]
    cache.save()
    assert served_tensors(source, these) == [True] * 5
    for tensor, matrix in zip(these, mapped, strict=True):
        np.testing.assert_array_equal(packing.dequantize(matrix, POOL), tensor.float32())


def test_full_disk_is_reported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*given: object) -> None:
        raise OSError(28, "No space left on device")

    (tensor,) = tensors(1)
    monkeypatch.setattr(packing._Writer, "add", raise_no_space)
    cache = PackedCache.open(key_of([source], None), in_file=True)
    with pytest.raises(CapacityError, match=r"do not fit into memory, and not into .* No space left"):
        cache.put(tensor, packing.pack(tensor, POOL))


@pytest.mark.parametrize("in_file", [False, True])
def test_weights_in_a_file_give_the_same_bits(
    tmp_path: Path, folder: Path, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs equal those of weights in memory bit for bit, before and after the file is deleted; a truncated file
    raises an error of one line."""
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
def test_concurrent_writers_leave_whole_files(source: Path, folder: Path) -> None:
    """Readers see a whole file at any time while two processes rewrite it."""
    these = tensors()
    filled(source, these)
    command = [sys.executable, "-P", "-c", _WRITER, str(Path(__file__).parent), str(source)]
    writers = [subprocess.Popen(command) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        assert served_tensors(source, these) == [True] * 3
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0] and served_tensors(source, these) == [True] * 3
    only_file(folder)


_WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
import test_packed_cache as own
for _ in range(20):
    own.filled(Path(sys.argv[2]), own.tensors())
"""


def test_checksum_of_strided_data_equals_its_copy() -> None:
    """A view of every other byte, such as one tap of a convolution of two."""
    data = np.arange(20_000, dtype=np.uint8)
    assert ends_crc(data[::2]) == ends_crc(data[::2].copy()) != ends_crc(data[1::2])
    assert make_tensor("w", (2, 2), "I8", data[:8:2]).fingerprint() == ends_crc(data[:8:2].copy())
