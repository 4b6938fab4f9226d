"""Files of tensors in parts: written as safetensors has it, read by region, and never beyond what they hold."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.tensor_files import Region, TensorFiles, write_tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


def test_other_libraries_read_the_files(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"gaps": torch.arange(12.0).reshape(3, 4).T, "none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    write_tensors(tmp_path / "file", {name: (t, Region.of_whole(t.shape)) for name, t in tensors.items()})
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("written", "wanted"), itertools.product(range(3), repeat=2))
def test_parts_along_one_axis_become_parts_along_another(tmp_path: Path, written: int, wanted: int) -> None:
    whole = torch.arange(5 * 6 * 7.0).reshape(5, 6, 7)
    for number, (part, region) in enumerate(cut(whole, written, 2)):
        write_tensors(tmp_path / f"{number}", {"name": (part, region)})
    files = TensorFiles(sorted(tmp_path.iterdir()))
    assert files.shape("name") == whole.shape
    for part, region in cut(whole, wanted, 3):
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.zeros_like(part, dtype=dtype)
            files.read("name", target, region)
            assert torch.equal(target, part.to(dtype))


def cut(whole: torch.Tensor, axis: int, count: int) -> list[tuple[torch.Tensor, Region]]:
    found, at = [], 0
    for part in whole.tensor_split(count, axis):
        start = [0] * whole.dim()
        start[axis] = at
        found.append((part, Region(tuple(start), tuple(part.shape), tuple(whole.shape))))
        at += part.shape[axis]
    return found


def test_a_missing_part_is_an_error(tmp_path: Path) -> None:
    part, region = cut(torch.ones(4, 2), 0, 2)[0]
    write_tensors(tmp_path / "file", {"name": (part, region)})
    with pytest.raises(SMPRuntimeError, match=r"has 4 of the 8 elements of name.*Fix: copy the files of all hosts"):
        TensorFiles([tmp_path / "file"]).read("name", torch.empty(4, 2), Region.of_whole((4, 2)))


def test_a_part_that_is_there_twice_replaces_no_other(tmp_path: Path) -> None:
    part, region = cut(torch.ones(4, 2), 0, 2)[0]
    for name in ("first", "second"):
        write_tensors(tmp_path / name, {"name": (part, region)})
    with pytest.raises(SMPRuntimeError, match=r"same part of name in several files. Fix: remove files of other"):
        TensorFiles(tmp_path.iterdir()).read("name", torch.empty(4, 2), Region.of_whole((4, 2)))


def forge(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["name"].update(values)


def forge_part(part: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update(__metadata__={"parts": json.dumps({"name": part})})


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "beyond the file": forge(data_offsets=[1000, 1016]),
    "before it": forge(data_offsets=[-16, 0]),
    "another size": forge(shape=[400]),
    "a shape without numbers": forge(shape=["4"]),
    "an unknown dtype": forge(dtype="object"),
    "a list": lambda header: header.update(name=[]),
    "no metadata": lambda header: header.update(__metadata__=3),
    "a part beyond the whole": forge_part([[1], [4]]),
    "a part of other axes": forge_part([[0, 0], [4, 4]]),
    "a part without numbers": forge_part([[0.5], [5]]),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_header_is_an_error(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = tmp_path / "file"
    write_tensors(file, {"name": (torch.ones(4), Region.of_whole((4,)))})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(SMPRuntimeError, match=r"file is damaged.*Fix: "):
        TensorFiles([file])


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x09" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[}"])
def test_a_cut_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SMPRuntimeError, match=r"file is damaged.*Fix: "):
        TensorFiles([tmp_path / "file"])
