"""The server that sleeps shows what a real one would: the checksums of what it loaded, and who made which token."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.sleeping_server import checksums, spans


def test_checksums_are_those_of_the_tensors_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16), "a": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    expected = {
        name: hashlib.sha256(one.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in tensors.items()
    }
    assert checksums(tmp_path) == expected


def test_spans_cover_every_token_once() -> None:
    assert spans(["1-0", "1-0", "1-2", "1-2", "1-2"]) == [
        {"version": "1-0", "start": 0, "end": 2},
        {"version": "1-2", "start": 2, "end": 5},
    ]
    assert spans([]) == []
