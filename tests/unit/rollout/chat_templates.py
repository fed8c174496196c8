"""Chat templates of the kinds that models come with, on the tiny model's tokenizer.

Each writes tools, calls and their answers in its own way, and treats the past in its own way: the first two never
touch it, the third leaves the reasoning of earlier turns out, the fourth moves the system message along.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_async.rollout.policy.text import TextCodec

TINY = Path(__file__).parents[3] / "configs" / "models" / "tiny"

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You may use tools.' }}
    {%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{%- endfor %}
    {{- '\\nCall one so: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

JSON_CALLS = """
{{- '<|endoftext|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' + role + '\\n\\n' }}
    {%- if message.role == 'user' and loop.index0 <= 1 and tools %}
        {{- 'Answer with JSON, {"name": ..., "parameters": ...}, to call one of these:\\n' }}
        {%- for tool in tools %}{{- (tool.function | tojson) + '\\n' }}{%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"""

REASONING = """
{%- set past = namespace(end=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set past.end = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < past.end and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MOVING_SYSTEM = """
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>' }}
        {%- if loop.index0 == last.user and messages[0].role == 'system' %}
            {{- messages[0].content + '\\n' }}
        {%- endif %}
        {{- message.content + '<|im_start|>' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content + '[/RESULT]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.tool_calls %}{{- '[CALLS]' + (message.tool_calls | map(attribute='function') | list | tojson) }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}"""

THINKING = HERMES.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>' }}")
"""Begins the thought itself, as those of models that always think do; what it writes of the past has it too."""
THINKING = THINKING.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}",
    "{{- '<|im_start|>' + message.role + '\\n' + ('<think>' if message.role == 'assistant' else '')"
    " + message.content }}",
)
GLM = HERMES + "{#- <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call> -#}"

KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
    {%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

DEEPSEEK = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content }}
        {%- if message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- '<｜User｜>' + message.content + ((tools | tojson) if loop.first and tools else '') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""
"""Joins the arguments as they are: they have to be a text."""

HARMONY = """
{%- if tools %}{{- '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>' in message.content or '<|message|>' in message.content %}
            {{- raise_exception('a message has channels') }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- (call.arguments | tojson) + '<|im_end|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
            {{- '<|end|>' if add_generation_prompt or not loop.last else '<|endoftext|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' + message.content }}
        {{- '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""Writes another token behind a call than behind a text, as gpt-oss' own does."""

SILENT = """
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant', 'developer'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Leaves out what it does not know."""

TEMPLATES = {"hermes": HERMES, "json": JSON_CALLS, "reasoning": REASONING, "moving": MOVING_SYSTEM}
MARKED = {"kimi": KIMI, "deepseek": DEEPSEEK, "harmony": HARMONY}
ODD = {**MARKED, "glm": GLM, "thinking": THINKING, "silent": SILENT}


@lru_cache
def tokenizer_with(template: str) -> Any:
    """The tiny tokenizer, speaking another template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = (TEMPLATES | ODD)[template]
    return tokenizer


def codec_with(template: str) -> TextCodec:
    tokenizer = tokenizer_with(template)
    return TextCodec(tokenizer, stop_token_ids=[tokenizer.eos_token_id], vocab_size=512)
