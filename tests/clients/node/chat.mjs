// Chats with a Headrace router: node chat.mjs HOST:PORT PROMPT [MAX_TOKENS]
// Prints one JSON line per message, so that a program can follow the stream.
import { fileURLToPath } from "node:url";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const DEADLINE_S = 60;
const protos = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../../protos");

function client(endpoint) {
  const definition = loader.loadSync("headrace/inference/v1/inference.proto", {
    includeDirs: [protos],
    enums: String,
    longs: Number,
  });
  const { headrace } = grpc.loadPackageDefinition(definition);
  return new headrace.inference.v1.InferenceService(endpoint, grpc.credentials.createInsecure());
}

const [endpoint, prompt, maxTokens = "32"] = process.argv.slice(2);
if (!endpoint || prompt === undefined) {
  console.error("usage: node chat.mjs HOST:PORT PROMPT [MAX_TOKENS]");
  process.exit(2);
}

const call = client(endpoint).Generate(
  {
    chat: { messages: [{ role: "user", content: prompt }] },
    sampling: { temperature: 0, maxTokens: Number(maxTokens) },
  },
  { deadline: Date.now() + DEADLINE_S * 1000 },
);
call.on("data", (message) => {
  const ended = message.finishReason !== "FINISH_REASON_UNSPECIFIED" && message.finishReason;
  console.log(JSON.stringify({ text: message.text ?? "", finish: ended || null, usage: message.usage ?? null }));
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exit(1);
});
