// Streams a chat through OpenAI's own client: node openai_chat.mjs BASE_URL PROMPT
// OPENAI_API_KEY has the API key. NODE_EXTRA_CA_CERTS names the authorities of the router's certificate.
import OpenAI from "openai";

const [baseURL, prompt] = process.argv.slice(2);
if (!baseURL || prompt === undefined) {
  console.error("usage: node openai_chat.mjs BASE_URL PROMPT");
  process.exit(2);
}
// It retries 429 and 503 after Retry-After.
const client = new OpenAI({ baseURL, maxRetries: 2, timeout: 30_000 });
const stream = await client.chat.completions.create({
  model: "sim",
  messages: [{ role: "user", content: prompt }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();
