// Chats with a Headrace router: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]
// docs/clients.md describes the arguments, the environment and the output, which all clients share.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "headrace/inference/v1/inference.grpc.pb.h"

namespace inference = headrace::inference::v1;

constexpr auto kDeadline = std::chrono::seconds(60);

std::string Setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The key, without the end of its line.
std::string ReadKey(const std::string& path) {
  const std::string text = ReadFile(path);
  return text.substr(0, text.find_last_not_of(" \r\n") + 1);
}

// TLS where an authority is named, and then the API key with every call.
std::shared_ptr<grpc::ChannelCredentials> Credentials() {
  const std::string authority = Setting("HEADRACE_TLS_AUTHORITY_FILE");
  const std::string key_file = Setting("HEADRACE_API_KEY_FILE");
  if (authority.empty()) {
    if (!key_file.empty()) {
      throw std::runtime_error("set HEADRACE_TLS_AUTHORITY_FILE: an API key is not sent in clear");
    }
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = ReadFile(authority);
  auto tls = grpc::SslCredentials(options);
  if (key_file.empty()) return tls;
  // It sends "authorization: Bearer KEY".
  return grpc::CompositeChannelCredentials(tls, grpc::AccessTokenCredentials(ReadKey(key_file)));
}

// Retries, where the service config is named.
grpc::ChannelArguments Options() {
  grpc::ChannelArguments options;
  const std::string file = Setting("HEADRACE_SERVICE_CONFIG_FILE");
  if (!file.empty()) options.SetServiceConfigJSON(ReadFile(file));
  return options;
}

// The ErrorInfo that the router attaches to an error. Empty without one.
google::rpc::ErrorInfo ErrorInfoOf(const grpc::Status& error) {
  google::rpc::Status status;
  google::rpc::ErrorInfo info;
  if (!status.ParseFromString(error.error_details())) return info;
  for (const auto& detail : status.details()) {
    if (detail.Is<google::rpc::ErrorInfo>()) detail.UnpackTo(&info);
  }
  return info;
}

std::string CodeName(grpc::StatusCode code) {
  static const char* const names[] = {
      "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
      "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
      "UNAUTHENTICATED"};
  return code >= 0 && code < std::size(names) ? names[code] : std::to_string(code);
}

int Report(const grpc::Status& error) {
  const auto info = ErrorInfoOf(error);
  const std::string reason = info.reason().empty() ? "-" : info.reason();
  std::cerr << CodeName(error.error_code()) << " " << reason << ": " << error.error_message() << "\n";
  for (const auto& [key, value] : info.metadata()) std::cerr << "  " << key << ": " << value << "\n";
  return 1;
}

int Chat(const std::string& endpoint, const std::string& prompt, int max_tokens, int cancel_after) {
  auto channel = grpc::CreateCustomChannel(endpoint, Credentials(), Options());
  auto stub = inference::InferenceService::NewStub(channel);

  inference::GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(max_tokens);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  auto reader = stub->Generate(&context, request);

  inference::GenerateResponse response;
  int received = 0;
  while (reader->Read(&response)) {
    std::cout << response.text() << std::flush;
    if (response.has_usage()) {
      const auto& usage = response.usage();
      std::cerr << "\n" << inference::FinishReason_Name(response.finish_reason())
                << " prompt=" << usage.prompt_tokens() << " completion=" << usage.completion_tokens()
                << " transferred=" << usage.transferred_tokens() << "\n";
    }
    if (++received == cancel_after) {
      context.TryCancel();
      break;
    }
  }
  const grpc::Status status = reader->Finish();
  if (cancel_after > 0 && status.error_code() == grpc::StatusCode::CANCELLED) {
    std::cerr << "\nCANCELLED after " << received << " messages\n";
    return 0;
  }
  return status.ok() ? 0 : Report(status);
}

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) {
    std::cerr << "usage: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]\n";
    return 2;
  }
  try {
    return Chat(argv[1], argv[2], argc > 3 ? std::stoi(argv[3]) : 32, argc > 4 ? std::stoi(argv[4]) : 0);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
