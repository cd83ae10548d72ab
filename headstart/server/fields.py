"""What becomes of request fields that the schema does not name: some are harmless, some would change the text and are
refused by name, all others are told in a header of the answer and in the log, as vLLM does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headstart.server import limits
from headstart.server.errors import BodyError

log = logging.getLogger("headstart.server")

HARMLESS = frozenset({
    "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "user",
    "prediction", "cache_prompt", "request_id", "keep_alive", "rid", "id_slot", "separate_reasoning",
})  # fmt: skip
"""They change no text: bookkeeping of OpenAI's, or hints for speed."""

_SAMPLER = "this server has temperature, top_k, top_p, min_p and the three penalties"
_CONSTRAINT = "use response_format, structured_outputs or guided_grammar"
_NOTHING = "leave it out"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # OpenAI's
    "audio": ((), "this server writes text only"),
    "modalities": ((["text"],), "this server writes text only"),
    "web_search_options": ((), _NOTHING),
    "verbosity": (("medium",), "say it in the messages"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    # vLLM's
    "use_beam_search": ((False,), _SAMPLER),
    "length_penalty": ((1, 1.0), _SAMPLER),
    "early_stopping": ((False,), _SAMPLER),
    "spaces_between_special_tokens": ((True,), _NOTHING),
    "logits_processors": (([],), _SAMPLER),
    "prompt_embeds": ((), "give the prompt as text or token ids"),
    "chat_template": ((), "start the server with --chat-template"),
    "mm_processor_kwargs": (({},), "this server reads text only"),
    "vllm_xargs": (({},), _NOTHING),
    "kv_transfer_params": (({},), _NOTHING),
    "thinking_token_budget": ((), "use max_tokens"),
    "repetition_detection": ((), _SAMPLER),
    "guided_decoding_backend": (("auto", "guidance", "llguidance"), _NOTHING),
    "guided_whitespace_pattern": ((), _CONSTRAINT),
    # SGLang's
    "regex": ((), "use guided_regex"),
    "ebnf": ((), "use guided_grammar"),
    "json_schema": ((), _CONSTRAINT),
    "stop_regex": ((), "use stop"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "custom_logit_processor": ((), _SAMPLER),
    "custom_params": (({},), _NOTHING),
    "lora_path": ((), "this server has one model"),
    # llama.cpp's, Ollama's and TGI's
    "grammar": ((), "use guided_grammar"),
    "n_predict": ((), "use max_tokens"),
    "max_new_tokens": ((), "use max_tokens"),
    "repeat_penalty": ((1, 1.0), "use repetition_penalty"),
    "typical_p": ((1, 1.0), _SAMPLER),
    "top_n_sigma": ((-1, -1.0), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "dynatemp_range": ((0, 0.0), _SAMPLER),
    "dry_multiplier": ((0, 0.0), _SAMPLER),
    "xtc_probability": ((0, 0.0), _SAMPLER),
    "samplers": ((), _SAMPLER),
    "watermark": ((False,), _SAMPLER),
    "options": (({},), "give its members as fields of the body"),
    "format": ((), _CONSTRAINT),
    "think": ((), "use chat_template_kwargs"),
}
"""They would change the text: values that mean nothing, and what to do instead. null means nothing in all of them."""

_told: set[str] = set()


def check(extra: Mapping[str, Any] | None) -> list[str]:
    """Names of fields that are ignored. Raises BodyError for those that must not be."""
    unknown = []
    for name, value in (extra or {}).items():
        if name in HARMLESS or value is None:
            continue
        if name not in REFUSED:
            unknown.append(name)
            continue
        nothing, hint = REFUSED[name]
        if value not in nothing or (isinstance(value, bool) != any(isinstance(each, bool) for each in nothing)):
            raise BodyError(f"{name} is not supported", name, hint)
    for name in unknown[:20]:
        if name not in _told and len(_told) < 1000:
            _told.add(name)
            log.warning("a request has a field that is not known, and ignored: %r", limits.shortened(name))
    return unknown


def header(unknown: list[str]) -> dict[str, str]:
    """The response header that names them."""
    shown = [name for name in unknown if name.isascii() and name.isprintable() and len(name) <= limits.QUOTED]
    return {"X-Ignored-Fields": ", ".join(shown[:20]) or str(len(unknown))} if unknown else {}
