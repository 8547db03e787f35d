"""The parsers that a chat template shows. The templates have the forms of well-known families, in few lines."""

import pytest

from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.parsing.detection import (
    PROBE_TOOL,
    Render,
    find_reasoning_parser,
    find_tool_call_parser,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# DeepSeek writes a wide bar, and a low block between words.
DEEPSEEK = {ord("|"): "\uff5c", ord("_"): "\u2581"}
CALLS = {
    "hermes": '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>",
    "qwen3_xml": "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "llama3_json": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "pythonic": "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% endfor %})]",
    "mistral": '[TOOL_CALLS][{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}]',
    "deepseek_v31": (
        "<|tool_calls_begin|><|tool_call_begin|>{{ c.function.name }}<|tool_sep|>"
        # It takes a text only.
        "{{ '' + c.function.arguments }}<|tool_call_end|><|tool_calls_end|>"
    ).translate(DEEPSEEK),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "": "<call {{ c.function.name }}>{{ c.function.arguments }}</call>",
}
THINKS = {
    "qwen3": "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "deepseek_r1": "<think>\n",
    "deepseek_v3": "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "mistral": "{# [THINK] #}",
    "seed_oss": "{# <seed:think> #}",
    "": "{# a model whose history may have had <think> #}",
}


def render_of(source: str) -> Render:
    template = ChatTemplate(source, {})

    def render(messages, variables, begins):  # type: ignore[no-untyped-def]
        values = template_values(messages, [PROBE_TOOL], variables)
        return template.render(values, continue_final_message=False, add_generation_prompt=begins)

    return render


@pytest.mark.parametrize("name", CALLS)
def test_the_parser_is_the_one_that_reads_the_templates_own_call(name: str) -> None:
    assert find_tool_call_parser(render_of(CHATML.replace("CALL", CALLS[name]))) == name


@pytest.mark.parametrize(
    "source",
    [CHATML.replace("CALL", ""), "{{ raise_exception('no') }}", "{{ messages[-1].content }}"],
)
def test_a_template_without_calls_has_no_parser(source: str) -> None:
    assert not find_tool_call_parser(render_of(source))


@pytest.mark.parametrize("name", THINKS)
def test_reasoning_is_found_by_how_the_prompt_of_an_answer_changes(name: str) -> None:
    source = CHATML.replace("assistant\n{% endif %}", f"assistant\n{THINKS[name]}{{% endif %}}")
    assert find_reasoning_parser(source, render_of(source)) == name
    assert not find_reasoning_parser(CHATML, render_of(CHATML))
