// Chats with a Headrace router: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]
// docs/clients.md describes the arguments, the environment and the output, which all clients share.
import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import headrace.inference.v1.Chat;
import headrace.inference.v1.ChatMessage;
import headrace.inference.v1.GenerateRequest;
import headrace.inference.v1.GenerateResponse;
import headrace.inference.v1.InferenceServiceGrpc;
import headrace.inference.v1.SamplingParams;
import headrace.inference.v1.Usage;
import io.grpc.CallCredentials;
import io.grpc.ChannelCredentials;
import io.grpc.CompositeChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import java.io.File;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;

public final class ChatClient {
  private static final long DEADLINE_S = 60;
  // Java's own uses the character set of the locale.
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

  /** Sends an API key with every call. */
  private static final class Bearer extends CallCredentials {
    private static final Metadata.Key<String> AUTHORIZATION =
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    private final String key;

    Bearer(String key) {
      this.key = key;
    }

    @Override
    public void applyRequestMetadata(RequestInfo request, Executor executor, MetadataApplier applier) {
      Metadata headers = new Metadata();
      headers.put(AUTHORIZATION, "Bearer " + key);
      applier.apply(headers);
    }

    @Override
    public void thisUsesUnstableApi() {}
  }

  private static String setting(String name) {
    return System.getenv().getOrDefault(name, "");
  }

  private static String read(String file) throws IOException {
    return Files.readString(Path.of(file), StandardCharsets.UTF_8);
  }

  /** TLS where an authority is named, and then the API key with every call. */
  private static ChannelCredentials credentials() throws IOException {
    String authority = setting("HEADRACE_TLS_AUTHORITY_FILE");
    String keyFile = setting("HEADRACE_API_KEY_FILE");
    if (authority.isEmpty()) {
      if (!keyFile.isEmpty()) {
        throw new IOException("set HEADRACE_TLS_AUTHORITY_FILE: an API key is not sent in clear");
      }
      return InsecureChannelCredentials.create();
    }
    ChannelCredentials tls = TlsChannelCredentials.newBuilder().trustManager(new File(authority)).build();
    return keyFile.isEmpty() ? tls : CompositeChannelCredentials.create(tls, new Bearer(read(keyFile).strip()));
  }

  /** With retries, where the service config is named. */
  @SuppressWarnings("unchecked")
  private static ManagedChannel open(String endpoint) throws IOException {
    ManagedChannelBuilder<?> builder = Grpc.newChannelBuilder(endpoint, credentials());
    String file = setting("HEADRACE_SERVICE_CONFIG_FILE");
    if (!file.isEmpty()) {
      Map<String, ?> config = new Gson().fromJson(read(file), Map.class);
      builder.defaultServiceConfig(config).enableRetry();
    }
    return builder.build();
  }

  /** The ErrorInfo that the router attaches to an error. Empty without one. */
  private static ErrorInfo errorInfo(StatusRuntimeException error) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status != null) {
      for (Any detail : status.getDetailsList()) {
        try {
          if (detail.is(ErrorInfo.class)) return detail.unpack(ErrorInfo.class);
        } catch (InvalidProtocolBufferException broken) {
          break;
        }
      }
    }
    return ErrorInfo.getDefaultInstance();
  }

  private static int report(StatusRuntimeException error) {
    Status status = error.getStatus();
    ErrorInfo info = errorInfo(error);
    String reason = info.getReason().isEmpty() ? "-" : info.getReason();
    System.err.println(status.getCode() + " " + reason + ": " + status.getDescription());
    info.getMetadataMap().forEach((key, value) -> System.err.println("  " + key + ": " + value));
    return 1;
  }

  private static GenerateRequest request(String prompt, int maxTokens) {
    return GenerateRequest.newBuilder()
        .setChat(Chat.newBuilder().addMessages(ChatMessage.newBuilder().setRole("user").setContent(prompt)))
        .setSampling(SamplingParams.newBuilder().setTemperature(0).setMaxTokens(maxTokens))
        .build();
  }

  /** Prints one message of the answer. */
  private static void print(GenerateResponse response) {
    OUT.print(response.getText());
    OUT.flush();
    if (response.hasUsage()) {
      Usage usage = response.getUsage();
      System.err.printf(
          "%n%s prompt=%d completion=%d transferred=%d%n",
          response.getFinishReason(),
          usage.getPromptTokens(),
          usage.getCompletionTokens(),
          usage.getTransferredTokens());
    }
  }

  private static int chat(ManagedChannel channel, GenerateRequest request, int cancelAfter) {
    int received = 0;
    Context.CancellableContext context = Context.current().withCancellation();
    Context previous = context.attach();
    try {
      Iterator<GenerateResponse> responses =
          InferenceServiceGrpc.newBlockingStub(channel)
              .withDeadlineAfter(DEADLINE_S, TimeUnit.SECONDS)
              .generate(request);
      while (responses.hasNext()) {
        print(responses.next());
        received += 1;
        if (received == cancelAfter) context.cancel(null);
      }
      return 0;
    } catch (StatusRuntimeException error) {
      if (cancelAfter > 0 && error.getStatus().getCode() == Status.Code.CANCELLED) {
        System.err.printf("%nCANCELLED after %d messages%n", received);
        return 0;
      }
      return report(error);
    } finally {
      context.detach(previous);
      context.cancel(null);
    }
  }

  public static void main(String[] arguments) throws InterruptedException {
    if (arguments.length < 2 || arguments.length > 4) {
      System.err.println("usage: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]");
      System.exit(2);
    }
    int maxTokens = arguments.length > 2 ? Integer.parseInt(arguments[2]) : 32;
    int cancelAfter = arguments.length > 3 ? Integer.parseInt(arguments[3]) : 0;
    int exitStatus = 2;
    try {
      ManagedChannel channel = open(arguments[0]);
      exitStatus = chat(channel, request(arguments[1], maxTokens), cancelAfter);
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    } catch (IOException error) {
      System.err.println(error.getMessage());
    }
    System.exit(exitStatus);
  }
}
