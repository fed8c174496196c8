"""A safetensors file is read as the library reads it, and nothing is left behind; or it is refused with the reason."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save, save_file

from areal_async.inference.embedded.engine.tensor_files import _DTYPES, read_tensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_every_dtype_and_shape_is_read_as_the_library_reads_it(file: Path) -> None:
    tensors = {
        f"{dtype}.{shape}": torch.arange(12).reshape(shape).to(dtype)
        for dtype in _DTYPES.values()
        for shape in ((12,), (3, 4), (1, 2, 6))
    }
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, file, metadata={"format": "pt"})

    found = dict(read_tensors(file))

    assert found.keys() == tensors.keys()
    for name, tensor in load(file.read_bytes()).items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_tensor_that_lies_askew_in_its_file_is_read(file: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    values = torch.tensor([1.5, -2.0])
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + values.numpy().tobytes())

    assert dict(read_tensors(file))["b"].tolist() == [1.5, -2.0]


def test_a_thousand_reads_leave_nothing_behind(file: Path) -> None:
    save_file({f"layer.{number}": torch.randn(300, 40) for number in range(20)}, file)

    def read() -> None:
        for _, tensor in read_tensors(file):
            tensor.clone()

    read()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(50):
        read()
    gc.collect()
    assert sys.getallocatedblocks() - before < 50 * 20, "the library's own reader leaves two for each tensor"


WHOLE = save({"a": torch.ones(4), "b": torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (WHOLE[:5], "need a header"),
        (WHOLE[:40], "need a header"),
        (b"\xff" * 8 + WHOLE[8:], "need a header"),
        (WHOLE[:-1], "got bytes 16 to 32 of 31, need 16"),
        (WHOLE.replace(b"[4]", b"[5]"), "need 20"),
        (WHOLE.replace(b'"F32"', b'"F99"'), "got dtype F99, need one of F64, F32"),
        (WHOLE.replace(b"[2,2]", b"-2   "), "header: Expected `array`"),
        (WHOLE.replace(b"{", b"\xff"), "header: "),
        (WHOLE.replace(b"[0,16]", b"[-8,8]"), "got bytes -8 to 8"),
    ],
)
def test_what_is_no_whole_file_is_refused(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)

    with pytest.raises(ValueError, match=reason):
        dict(read_tensors(file))
