"""Chat templates written for these tests, each in the manner of a published family."""

from __future__ import annotations

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "You may call these functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set state.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > state.last_user %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson if call.function.arguments is mapping else call.function.arguments }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

INSTRUCTION = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
    {% set turns = messages[1:] %}
{% else %}
    {% set system = '' %}
    {% set turns = messages %}
{% endif %}
{% for m in turns %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if m['role'] == 'user' %}
        {{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] | trim + ' [/INST]' }}
    {% else %}
        {{ ' ' + m['content'] | trim + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""

HEADERS = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now("%d %b %Y") %}
{%- macro header(role) %}<|im_start|>{{ role }}<|endoftext|>

{% endmacro %}
{{- header('system') }}Today Date: {{ date }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'end' %}{% break %}{% endif %}
    {{- header(message['role']) }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""

PARTS = """\
{{ bos_token }}{% for message in messages %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
<|im_start|>{{ role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""

TRAINING = """\
{% for message in messages %}
{% if message.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>
{% endgeneration %}{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS_JSON = """\
[AVAILABLE_TOOLS]{{ tools | tojson(indent=2) if tools else '[]' }}[/AVAILABLE_TOOLS]
{%- for message in messages %}
{{ message.role | upper }}: {{ message.content or '(nothing)' }}{{ eos_token }}
{%- if message.tool_calls is defined %}
{{- dict(calls=message.tool_calls) | tojson(sort_keys=true, separators=(',', ':')) }}
{%- endif %}
{%- endfor %}"""

FAMILIES = {
    "chatml": CHATML,
    "instruction": INSTRUCTION,
    "headers": HEADERS,
    "training": TRAINING,
    "tools_json": TOOLS_JSON,
}
