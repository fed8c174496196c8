"""What tokens say is had once for a reply, and is what the tokenizer itself says."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_async.config.settings import SamplingSettings
from areal_async.errors import WorkflowError
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
