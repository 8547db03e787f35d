// Chats with a Headrace router: node chat.mjs HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]
// docs/clients.md describes the arguments, the environment and the output, which all clients share.
import { readFileSync } from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const DEADLINE_S = 60;
const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../..");

const messages = loader.loadSync(
  ["headrace/inference/v1/inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"],
  { includeDirs: [`${ROOT}/protos`, `${ROOT}/build/clients/googleapis`], enums: String, longs: Number },
);
const { InferenceService } = grpc.loadPackageDefinition(messages).headrace.inference.v1;

// TLS where an authority is named, and then the API key with every call.
function credentials() {
  const authority = process.env.HEADRACE_TLS_AUTHORITY_FILE;
  const keyFile = process.env.HEADRACE_API_KEY_FILE;
  if (!authority) {
    if (keyFile) throw new Error("set HEADRACE_TLS_AUTHORITY_FILE: an API key is not sent in clear");
    return grpc.credentials.createInsecure();
  }
  const tls = grpc.credentials.createSsl(readFileSync(authority));
  if (!keyFile) return tls;
  const key = readFileSync(keyFile, "utf8").trim();
  const bearer = grpc.credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", `Bearer ${key}`);
    done(null, metadata);
  });
  return grpc.credentials.combineChannelCredentials(tls, bearer);
}

// Retries, where the service config is named.
function options() {
  const file = process.env.HEADRACE_SERVICE_CONFIG_FILE;
  return file ? { "grpc.service_config": readFileSync(file, "utf8") } : {};
}

// The ErrorInfo that the router attaches to an error, or undefined.
function errorInfo(error) {
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  if (!bytes) return undefined;
  const details = messages["google.rpc.Status"].deserialize(bytes).details ?? [];
  const info = details.find((any) => any.type_url.endsWith("/google.rpc.ErrorInfo"));
  return info && messages["google.rpc.ErrorInfo"].deserialize(info.value);
}

function chat(endpoint, prompt, maxTokens, cancelAfter) {
  const client = new InferenceService(endpoint, credentials(), options());
  const call = client.Generate(
    {
      chat: { messages: [{ role: "user", content: prompt }] },
      sampling: { temperature: 0, maxTokens },
    },
    { deadline: Date.now() + DEADLINE_S * 1000 },
  );
  let received = 0;
  call.on("data", (response) => {
    process.stdout.write(response.text ?? "");
    received += 1;
    if (response.usage) {
      const { promptTokens = 0, completionTokens = 0, transferredTokens = 0 } = response.usage;
      console.error(
        `\n${response.finishReason} prompt=${promptTokens} completion=${completionTokens} transferred=${transferredTokens}`,
      );
    }
    if (received === cancelAfter) call.cancel();
  });
  call.on("error", (error) => {
    if (cancelAfter && error.code === grpc.status.CANCELLED) {
      console.error(`\nCANCELLED after ${received} messages`);
      return;
    }
    const info = errorInfo(error);
    console.error(`${grpc.status[error.code]} ${info?.reason ?? "-"}: ${error.details}`);
    for (const [key, value] of Object.entries(info?.metadata ?? {})) console.error(`  ${key}: ${value}`);
    process.exitCode = 1;
  });
}

const [endpoint, prompt, maxTokens = "32", cancelAfter = "0"] = process.argv.slice(2);
if (!endpoint || prompt === undefined) {
  console.error("usage: node chat.mjs HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]");
  process.exit(2);
}
try {
  chat(endpoint, prompt, Number(maxTokens), Number(cancelAfter));
} catch (error) {
  console.error(error.message);
  process.exitCode = 2;
}
