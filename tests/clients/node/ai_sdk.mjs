// Three turns with a tool through Vercel's AI SDK and its default model of OpenAI: node ai_sdk.mjs BASE_URL
// Its later requests name the items of earlier answers by item_reference.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const sent = [];
const openai = createOpenAI({
  baseURL: process.argv[2],
  apiKey: "none",
  fetch: (url, init) => {
    sent.push(JSON.parse(init.body));
    return fetch(url, init);
  },
});
const options = {
  model: openai("sim"),
  tools: {
    weather: tool({ inputSchema: z.object({ city: z.enum(["Paris"]) }), execute: async () => "mild" }),
  },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  stopWhen: stepCountIs(2),
  maxOutputTokens: 64,
  maxRetries: 0,
};
const messages = [];
const turns = [];
for (const [number, run] of [generateText, streamText, generateText].entries()) {
  messages.push({ role: "user", content: `question ${number}` });
  const result = await run({ ...options, messages });
  const steps = await result.steps;
  messages.push(...(await result.response).messages);
  turns.push({
    called: steps.flatMap((step) => step.toolCalls.map((call) => call.input)),
    text: (await result.text).length > 0,
  });
}
const references = sent.map((body) => body.input.filter((item) => item.type === "item_reference").length);
console.log(JSON.stringify({ turns, references }));
