"""What tokens say is had once for a reply, and is what the tokenizer itself says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from areal_async.config.settings import SamplingSettings
from areal_async.errors import WorkflowError
from areal_async.inference.model_files import read_files
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.policy.text import load_codec
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from tests.unit.rollout.chat_templates import TINY

pytestmark = pytest.mark.anyio


def test_text_is_what_the_tokenizer_of_transformers_writes() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    codec = load_codec(str(TINY))
    ids = [*codec.encode("Amy has 2 boxes , and Joe 's are é\n <b>"), *codec.stop_token_ids]

    for is_skipped in (True, False):
        expected = tokenizer.decode(ids, skip_special_tokens=is_skipped)
        assert codec.decode(ids, skip_special_tokens=is_skipped) == expected


TEXTS = ("Amy has 2 boxes , and Joe 's are é\n <b>", "<|im_start|>user\nx<|im_end|>\n", "  tabs\tand 漢字 ")


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "qwen2"])
def test_files_give_the_tokenizer_that_transformers_takes(tmp_path: Path, named: str, model_type: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, key, value in (
        ("config.json", "model_type", model_type),
        ("tokenizer_config.json", "tokenizer_class", named),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {key: value}))
    theirs: Any = AutoTokenizer.from_pretrained(str(folder))

    found = read_files(str(folder))

    takes_it = model_type.startswith("qwen3") or (model_type == "llama" and named != "Qwen2Tokenizer")
    assert (found is not None) == takes_it
    if found is None:
        return
    ours = found.tokenizer
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert vars(ours).keys() == vars(theirs).keys()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    asked = [{"role": "user", "content": "one and one?"}]
    assert ours.apply_chat_template(asked, tokenize=False) == theirs.apply_chat_template(asked, tokenize=False)
    config = AutoConfig.from_pretrained(str(folder))
    assert found.vocab_size == config.get_text_config().vocab_size
    assert found.end_ids == {theirs.eos_token_id, GenerationConfig.from_pretrained(str(folder)).eos_token_id} - {None}


def test_a_node_reads_and_writes_text_without_torch() -> None:
    code = (
        "import sys, areal_async.rollout.main\n"
        "from areal_async.rollout.policy.text import load_codec\n"
        f"codec = load_codec({str(TINY)!r})\n"
        "codec.decode(codec.encode(codec.render([{'role': 'user', 'content': 'one?'}])))\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "True"]


async def test_a_plain_reply_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = codec()
    decode, decoded = plain.decode, list[int]()

    def counted(token_ids: Any, **options: Any) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(plain, "decode", counted)
    policy = RecordingPolicy(ScriptedModel([*b"four", END]), plain, SamplingSettings(), name="t")

    reply = await policy.complete([1, 2])

    assert (reply.text, decoded) == ("four", [5])


async def test_half_a_surrogate_pair_is_said_with_what_stands_before_it() -> None:
    policy = RecordingPolicy(ScriptedModel([END]), load_codec(str(TINY)), SamplingSettings(), name="t")

    with pytest.raises(
        WorkflowError, match=r"^prompt: got '\\ud800', which is half a character, after '.*two', need text"
    ):
        await policy.chat([{"role": "user", "content": "two\ud800"}])
    with pytest.raises(WorkflowError, match=r"^prompt: got '\\udcff', which is half a character, after '', need text"):
        await policy.complete("\udcff and more")
    assert policy.turns == []
