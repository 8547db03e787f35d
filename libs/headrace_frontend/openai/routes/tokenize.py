"""The routes that convert prompts to tokens and back, and count them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_frontend.openai.block_apis.anthropic_bodies import CountTokensBody
from headrace_frontend.openai.body import checked_body
from headrace_frontend.openai.conversion import tokenize_request
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.parts import OpenAiParts
from headrace_frontend.openai.requests import DetokenizeBody, TokenizeBody
from headrace_frontend.openai.routes.intake import Intake, openai_names


class TokenizeRoutes:
    """Answers about tokens, without a worker."""

    def __init__(self, parts: OpenAiParts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def count_tokens(self, exchange: HttpExchange) -> None:
        """/v1/messages/count_tokens."""
        tenant, _, prompt = await self._intake.converted(
            exchange, CountTokensBody, lambda body: checked_body(TokenizeBody, body.prompt)
        )
        _, tokens = await self._tokens_of(prompt, tenant)
        await exchange.respond_object({"input_tokens": len(tokens)})

    async def tokenize(self, exchange: HttpExchange) -> None:
        """/tokenize."""
        tenant, body = await self._intake.read(exchange, TokenizeBody)
        model, tokens = await self._tokens_of(body, tenant)
        preparer = self._parts.preparer
        texts = None
        if body.return_token_strs:
            texts = await preparer.token_texts(model, tokens, tenant)
        await exchange.respond_object(
            {
                "count": len(tokens),
                "max_model_len": preparer.max_model_len(model),
                "tokens": list(tokens),
                "token_strs": texts,
            }
        )

    async def _tokens_of(self, body: TokenizeBody, tenant: str) -> tuple[str, Sequence[int]]:
        """The model, and the tokens of the prompt."""
        preparer = self._parts.preparer
        if body.messages is not None:
            model = preparer.choice(body.model).model
            await self._parts.images.fetch(body.messages, self._parts.codecs[model])
        with openai_names(chat=False):
            async with self._intake.admitted(tenant):
                prepared = await preparer.tokenize(
                    tokenize_request(body),
                    tenant,
                    add_generation_prompt=body.add_generation_prompt,
                )
                tokens: Sequence[int] = prepared.token_ids
                if body.prompt is not None and not body.adds_special_tokens:
                    tokens = await preparer.tokenize_part(prepared.model, body.prompt, tenant)
                elif body.prompt is None and body.adds_special_tokens:
                    before, after = preparer.special_tokens(prepared.model)
                    tokens = (*before, *tokens, *after)
        return prepared.model, tokens

    async def detokenize(self, exchange: HttpExchange) -> None:
        """/detokenize."""
        tenant, body = await self._intake.read(exchange, DetokenizeBody)
        model = self._parts.preparer.choice(body.model).model
        async with self._intake.admitted(tenant):
            text = await self._parts.preparer.detokenize(model, body.tokens, tenant)
        await exchange.respond_object({"prompt": text})
