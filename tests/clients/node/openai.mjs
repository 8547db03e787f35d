// Uses a Headrace router through OpenAI's own client: node openai.mjs http://HOST:PORT/v1
// Prints one JSON object with what each feature returned.
import OpenAI from "openai";

const [baseURL] = process.argv.slice(2);
if (!baseURL) {
  console.error("usage: node openai.mjs BASE_URL");
  process.exit(2);
}
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 30_000 });
const messages = [{ role: "user", content: "Hello" }];
const base = { model: "sim", messages, temperature: 0, max_completion_tokens: 12 };
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);
found.chat = await client.chat.completions.create(base);

const stream = await client.chat.completions.create({
  ...base,
  stream: true,
  stream_options: { include_usage: true },
});
found.streamed = "";
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  found.usage = chunk.usage ?? found.usage;
}

found.choices = await client.chat.completions.create({
  ...base,
  n: 3,
  seed: 5,
  temperature: 1,
  logprobs: true,
  top_logprobs: 2,
});

// The client's own helper puts the deltas of calls together.
const called = client.chat.completions.stream({
  ...base,
  max_completion_tokens: 200,
  tools,
  tool_choice: "required",
});
found.calls = (await called.finalChatCompletion()).choices[0];

found.json = await client.chat.completions.create({
  ...base,
  max_completion_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "answer", schema: parameters } },
});

const long = await client.chat.completions.create({ ...base, max_completion_tokens: 4000, stream: true });
for await (const _ of long) {
  long.controller.abort();
  break;
}
found.aborted = long.controller.signal.aborted;

try {
  await client.chat.completions.create({ ...base, temperature: 9 });
} catch (error) {
  found.error = { status: error.status, param: error.param, code: error.code };
}
console.log(JSON.stringify(found));
