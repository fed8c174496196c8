"""How a call is sampled, in SGLang's words."""

from typing import Any

from areal_async.config.policy import GRAMMARS, CallSampling
from areal_async.config.settings import SamplingSettings

ALWAYS_SAID = ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos")
"""Fields of the sampling that every request has."""
CALL_FORMS = ("stop_token_ids", "seed", "top_logprobs", *GRAMMARS)
"""Fields of a call's sampling that SGLang has in another form or under another name."""


def sampling_params(sampling: SamplingSettings, stop_token_ids: list[int]) -> dict[str, Any]:
    """Return SGLang's form of the settings; what asks for nothing is left out, but for what every request says.

    ``top_logprobs_num`` is among them, which SGLang has beside its sampling parameters.
    """
    params: dict[str, Any] = {name: getattr(sampling, name) for name in ALWAYS_SAID}
    params |= sampling.model_dump(mode="json", exclude_defaults=True, exclude={*ALWAYS_SAID, *CALL_FORMS})
    params["stop_token_ids"] = [] if sampling.ignore_eos else stop_token_ids
    if isinstance(sampling, CallSampling):
        params |= sampling.grammar
        if not sampling.ignore_eos:
            params["stop_token_ids"] = sorted({*stop_token_ids, *sampling.stop_token_ids})
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if sampling.top_logprobs:
            params["top_logprobs_num"] = sampling.top_logprobs
    return params
