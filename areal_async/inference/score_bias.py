"""A folder in which SGLang finds the bias that a sequence classifier's head does not have.

SGLang gives the heads of Qwen2 and Qwen3 classifiers a bias; transformers' have none. What is not in the folder stays
as it was drawn by lot, so every server would add a number of its own to all its scores. A bias of 0 beside the weights
makes the two one model.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_async.errors import UserError

WITH_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
"""Architectures whose head has a bias in SGLang 0.5.23."""
DEFAULT_LABELS = ("LABEL_0", "LABEL_1")
"""Labels of a config that names none, as transformers has them."""
BIAS = "score.bias"
BIAS_FILE = "score_bias.safetensors"
INDEX = "model.safetensors.index.json"


def needs_bias(model: Path) -> bool:
    """Say whether a bias has to be put beside the weights in this folder for SGLang.

    Raises:
        UserError: its config cannot be read.
    """
    config = _read_json(model / "config.json")
    if not any(name in WITH_BIAS for name in config.get("architectures") or ()):
        return False
    return BIAS not in _tensor_names(model)


def write_with_bias(model: Path, directory: Path) -> None:
    """Make ``directory`` the folder of the same model with a head's bias of 0; its files are links to the first one's.

    Raises:
        UserError: the weights are not safetensors.
    """
    if not any(model.glob("*.safetensors")):
        raise UserError(f"model: got {model} without safetensors, need them to serve a reward model with SGLang")
    directory.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.name != INDEX:
            (directory / path.name).symlink_to(path.resolve())
    config = _read_json(model / "config.json")
    num_labels = len(config.get("id2label") or DEFAULT_LABELS)
    save_file({BIAS: np.zeros(num_labels, np.float32)}, directory / BIAS_FILE)
    if (model / INDEX).is_file():
        index = _read_json(model / INDEX)
        index["weight_map"] = {**index["weight_map"], BIAS: BIAS_FILE}
        (directory / INDEX).write_text(json.dumps(index))


def _tensor_names(model: Path) -> set[str]:
    if (model / INDEX).is_file():
        return set(_read_json(model / INDEX).get("weight_map", ()))
    names: set[str] = set()
    for path in model.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                names |= set(file.keys())
        except (OSError, SafetensorError) as exc:
            raise UserError(f"model: cannot read {path}: {exc}; write it anew") from exc
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UserError(f"model: cannot read {path}: {exc}; give a model's folder") from exc
    return content if isinstance(content, dict) else {}
