"""Tokens of conversations: the chat template, with protection against control tokens in the texts of clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace_common.errors import InvalidRequest
from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, ToolCall, TooManyTokens
from headrace_text.control_tokens import ControlTokens, EscapedChat, control_texts, texts_in
from headrace_text.piece_cache import PieceCache
from headrace_text.tokenizing import encode, make_tokenizer, reject_far_too_long

_NO_TEXT = (
    "has the text of a control token, which this model's tokenizer cannot encode as text; remove it"
)
_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": []},
    },
}


class ChatEncoder:
    """Renders and encodes conversations. Only the chat template makes control tokens."""

    def __init__(
        self,
        folder: Path,
        description: Mapping[str, Any],
        tokenizer: Any,
        source: str,
        special_tokens: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, special_tokens)
        added: list[dict[str, Any]] = description.get("added_tokens") or []
        texts = control_texts(
            ((token["content"], token["special"]) for token in added), tokenizer, self._frames()
        )
        self._control_tokens = ControlTokens(texts)
        self._control_ids = frozenset(map(tokenizer.token_to_id, texts))
        self._pieces = PieceCache(tokenizer, added, texts)
        # With this switch a tokenizer treats special tokens as text. Here these are the control tokens.
        tokens = [{**token, "special": token["content"] in texts} for token in added]
        self._plain = make_tokenizer(folder, {**description, "added_tokens": tokens})
        self._plain.encode_special_tokens = True
        self._normalizes_control_texts = description.get("normalizer") is not None and any(
            token["normalized"] for token in added if token["content"] in texts
        )

    def encode(
        self,
        values: Mapping[str, Any],
        continue_final_message: bool,
        tokens_max: int | None,
        cache_scope: str = "",
    ) -> list[int]:
        """Tokens of a conversation. `values` are as of `template_values`. Raises InvalidRequest and TooManyTokens.

        `cache_scope`: see PieceCache.
        """
        texts = "\n".join(text for _, text in texts_in(values))
        reject_far_too_long(self._tokenizer, texts, tokens_max)
        escaped = self._control_tokens.escape(values)
        if self._normalizes_control_texts:
            self._check_normalized(escaped.values)
        text = self._template.render(escaped.values, continue_final_message=continue_final_message)
        # The template contains the special tokens: adding them here would double them.
        if escaped.originals:
            return self._encode_escaped(text, escaped, tokens_max)
        return self._pieces.encode(text, cache_scope, tokens_max)

    def _encode_escaped(self, text: str, escaped: EscapedChat, tokens_max: int | None) -> list[int]:
        """Encodes the texts between two control tokens of the template by themselves, as tokenizers do."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        least_count = len(encoding) - escaped.placeholder_characters(text)
        if tokens_max is not None and least_count > tokens_max:
            raise TooManyTokens(least_count)
        ids: list[int] = []
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_ids:
                ids += self._encode_content(text[position:start], escaped)
                ids.append(token_id)
                position = end
        ids += self._encode_content(text[position:], escaped)
        if tokens_max is not None and len(ids) > tokens_max:
            raise TooManyTokens(len(ids))
        return ids

    def _encode_content(self, text: str, escaped: EscapedChat) -> list[int]:
        if not text:
            return []
        ids: list[int] = encode(self._plain, escaped.restore(text)).ids
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequest({"chat.messages": _NO_TEXT})
        return ids

    def _check_normalized(self, values: Mapping[str, Any]) -> None:
        """Raises InvalidRequest for a text that becomes a control text only when it is normalized."""
        for path, text in texts_in(values):
            if not self._control_ids.isdisjoint(encode(self._tokenizer, text).ids):
                raise InvalidRequest({path: _NO_TEXT})

    def _frames(self) -> Iterator[str]:
        for roles in (("user",), ("system", "user", "assistant", "user")):
            yield from self._frame(template_values([ChatMessage(role, "x") for role in roles]))
        call = ChatMessage("assistant", "", tool_calls=(ToolCall("x", "x", {"x": "x"}),))
        result = ChatMessage("tool", "x", name="x", tool_call_id="x")
        yield from self._frame(
            template_values([ChatMessage("user", "x"), call, result], [_ANY_TOOL])
        )

    def _frame(self, values: Mapping[str, Any]) -> Iterator[str]:
        # Some templates reject system messages or tools.
        with suppress(InvalidRequest):
            yield self._template.render(values, continue_final_message=False)
