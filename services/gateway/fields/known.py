"""Fields of other servers and clients that would change an answer and are not supported here, by name.

Beside each stand the field to use instead, and its values that change nothing. Clients send many of these by default,
so they are accepted, as ``null`` always is. A field in no list changes no answer: it is passed over, and named.
"""

from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """The reply to a field that cannot be honoured."""

    instead: str  # the field to use; empty: there is none
    neutral: tuple[Any, ...]


def _refusal(instead: str = "", *neutral: Any) -> Refusal:
    return Refusal(instead, neutral)


_OPENAI = {
    "audio": _refusal(),
    "background": _refusal("/v1/batches", False),
    "best_of": _refusal("n"),
    "conversation": _refusal("previous_response_id of /v1/responses"),
    "function_call": _refusal("", "none", "auto"),
    "functions": _refusal("", []),
    "modalities": _refusal("", ["text"]),
    "moderation": _refusal(),
    "reasoning": _refusal("reasoning_effort", {}),
    "suffix": _refusal("", ""),
    "web_search_options": _refusal(),
}
_ANTHROPIC = {
    "container": _refusal(),
    "mcp_servers": _refusal("", []),
    "output_format": _refusal("output_config.format"),
}
_OF_OTHER_ROUTES = {
    "include_reasoning": _refusal("/v1/chat/completions", True),
    "tool_choice": _refusal("/v1/chat/completions", "none", "auto"),
    "tools": _refusal("/v1/chat/completions", []),
    "continue_final_message": _refusal("/v1/chat/completions", False),
    "add_special_tokens": _refusal("", False),  # chats: their template says what is special
    "echo": _refusal("/v1/completions", False),
    "input": _refusal("messages, prompt or /v1/responses"),
    "messages": _refusal("/v1/chat/completions"),
    "previous_response_id": _refusal("/v1/responses"),
    "prompt": _refusal("messages, input, or /v1/completions"),
    "prompt_logprobs": _refusal("/v1/completions", 0),
    "top_logprobs": _refusal("logprobs", 0),
}
_VLLM = {
    "chat_template": _refusal(),
    "documents": _refusal("chat_template_kwargs", []),
    "embed_dtype": _refusal("", "float32"),
    "ec_transfer_params": _refusal(),
    "endianness": _refusal("", "native", "little"),
    "guided_json_object": _refusal("response_format", False),
    "guided_whitespace_pattern": _refusal(),
    "kv_transfer_params": _refusal(),
    "logits_processors": _refusal("", []),
    "logprob_token_ids": _refusal("top_logprobs", []),
    "max_tokens_per_doc": _refusal(),
    "max_tokens_per_query": _refusal(),
    "media_io_kwargs": _refusal("", {}),
    "mm_processor_kwargs": _refusal("", {}),
    "prompt_embeds": _refusal("prompt"),
    "repetition_detection": _refusal(),
    "return_prompt_text": _refusal("return_token_ids", False),
    "spaces_between_special_tokens": _refusal("", True),
    "structural_tag": _refusal("structured_outputs"),
    "thinking_token_budget": _refusal(),
    "truncate_prompt_tokens": _refusal(),
    "truncation_side": _refusal("", "left"),
    "use_activation": _refusal("", True),
    "use_beam_search": _refusal("", False),
    "vllm_xargs": _refusal("", {}),
    "watermarking": _refusal("", False),
}
_SGLANG = {
    "custom_logit_processor": _refusal(),
    "custom_params": _refusal("", {}),
    "input_embeds": _refusal("prompt"),
    "input_ids": _refusal("prompt"),
    "lora_path": _refusal(),
    "max_new_tokens": _refusal("max_tokens"),
    "min_new_tokens": _refusal("min_tokens", 0),
    "no_stop_trim": _refusal("include_stop_str_in_output", False),
    "return_hidden_states": _refusal("", False),
    "return_logprob": _refusal("logprobs", False),
    "return_routed_experts": _refusal("", False),
    "sampling_params": _refusal("the same fields beside prompt", {}),
    "sampling_seed": _refusal("seed"),
    "separate_reasoning": _refusal("", True),
    "session_params": _refusal("", {}),
    "stop_regex": _refusal("stop", [], ""),
    "stream_reasoning": _refusal("", True),
    "top_logprobs_num": _refusal("logprobs", 0),
}
_TGI = {
    "adapter_id": _refusal(),
    "decoder_input_details": _refusal("prompt_logprobs", False),
    "details": _refusal("logprobs", False),
    "do_sample": _refusal("temperature", True),
    "guideline": _refusal("messages"),
    "inputs": _refusal("prompt"),
    "parameters": _refusal("the same fields beside prompt", {}),
    "return_full_text": _refusal("echo", False),
    "tool_prompt": _refusal(),
    "top_n_tokens": _refusal("logprobs", 0),
    "truncate": _refusal(),
    "typical_p": _refusal("", 1),
    "watermark": _refusal("", False),
}
_LLAMA_CPP = {
    "adaptive_target": _refusal("", -1),
    "dry_multiplier": _refusal("", 0),
    "dynatemp_range": _refusal("", 0),
    "image_data": _refusal("", []),
    "lora": _refusal("", []),
    "max_length": _refusal("max_tokens"),
    "min_keep": _refusal("", 0),
    "mirostat": _refusal("", 0),
    "n_discard": _refusal("", 0),
    "n_indent": _refusal("", 0),
    "n_keep": _refusal("", 0),
    "n_predict": _refusal("max_tokens"),
    "n_probs": _refusal("logprobs", 0),
    "post_sampling_probs": _refusal("logprobs", False),
    "reasoning_format": _refusal("", "none", "auto"),
    "repeat_penalty": _refusal("repetition_penalty", 1),
    "response_fields": _refusal("", []),
    "return_tokens": _refusal("return_token_ids", False),
    "samplers": _refusal(),
    "t_max_predict_ms": _refusal("moesaic.deadline_ms", 0),
    "tfs_z": _refusal("", 1),
    "thinking_forced_open": _refusal("", False),
    "top_n_sigma": _refusal("", -1, 0),
    "xtc_probability": _refusal("", 0),
}
_TRANSFORMERS = {
    "bad_words_ids": _refusal("bad_words", []),
    "begin_suppress_tokens": _refusal("logit_bias", []),
    "constraints": _refusal("", []),
    "dola_layers": _refusal(),
    "encoder_no_repeat_ngram_size": _refusal("", 0),
    "encoder_repetition_penalty": _refusal("", 1),
    "eos_token_id": _refusal("stop_token_ids"),
    "epsilon_cutoff": _refusal("min_p", 0),
    "eta_cutoff": _refusal("min_p", 0),
    "exponential_decay_length_penalty": _refusal(),
    "force_words_ids": _refusal("", []),
    "forced_bos_token_id": _refusal(),
    "forced_eos_token_id": _refusal(),
    "guidance_scale": _refusal("", 1),
    "max_time": _refusal("moesaic.deadline_ms"),
    "min_length": _refusal("min_tokens", 0),
    "negative_prompt": _refusal("", ""),
    "no_repeat_ngram_size": _refusal("frequency_penalty", 0),
    "num_beam_groups": _refusal("", 1),
    "num_beams": _refusal("", 1),
    "num_return_sequences": _refusal("n", 1),
    "output_attentions": _refusal("", False),
    "output_hidden_states": _refusal("", False),
    "output_logits": _refusal("logprobs", False),
    "output_scores": _refusal("logprobs", False),
    "penalty_alpha": _refusal("", 0),
    "sequence_bias": _refusal("logit_bias", {}, []),
    "stop_strings": _refusal("stop", [], ""),
    "suppress_tokens": _refusal("logit_bias", []),
    "token_healing": _refusal("", False),
    "top_h": _refusal(),
    "watermarking_config": _refusal(),
}
_OTHERS = {
    "bad": _refusal("bad_words", [], ""),
    "beam_width": _refusal("", 1),
    "cfg_scale": _refusal("", 1),
    "dynamic_temperature": _refusal("", False),
    "enable_search": _refusal("", False),
    "enable_thinking": _refusal("chat_template_kwargs"),
    "format": _refusal("response_format", ""),
    "max_tokens_to_sample": _refusal("max_tokens"),
    "num_predict": _refusal("max_tokens"),
    "options": _refusal("the same fields beside messages", {}),
    "plugins": _refusal("", []),
    "random_seed": _refusal("seed"),
    "raw": _refusal("/v1/completions", False),
    "safe_prompt": _refusal("", False),
    "smoothing_factor": _refusal("", 0),
    "stop_sequences": _refusal("stop", []),
    "stop_words": _refusal("stop", []),
    "system": _refusal("a message with role system", ""),
    "template": _refusal("", ""),
    "tfs": _refusal("", 1),
    "think": _refusal("chat_template_kwargs"),
    "thinking": _refusal("chat_template_kwargs"),
    "thinking_budget": _refusal(),
    "top_a": _refusal("", 0),
    "transforms": _refusal("", []),
}
REFUSED: dict[str, Refusal] = (
    _OPENAI
    | _ANTHROPIC
    | _OF_OTHER_ROUTES
    | _VLLM
    | _SGLANG
    | _TGI
    | _LLAMA_CPP
    | _TRANSFORMERS
    | _OTHERS
)
"""Fields of a body."""

WITHIN: dict[str, dict[str, Refusal]] = {
    "messages": {
        "audio": _refusal(),
        "function_call": _refusal(),
        "partial": _refusal("continue_final_message", False),
        "prefix": _refusal("continue_final_message", False),
        "tools": _refusal("", []),
    },
    "response_format": {
        "schema": _refusal("response_format.json_schema"),
        "value": _refusal("response_format.json_schema, or structured_outputs"),
    },
}
"""Fields of the objects in a body, by the object's name."""

ONLY_KNOWN = {"moesaic": (), "structured_outputs": (False,)}
"""Objects of which every other field would change the answer, and the values of these that change nothing."""
