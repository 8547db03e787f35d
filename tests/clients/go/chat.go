// Chats with a Headrace router: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]
// docs/clients.md describes the arguments, the environment and the output, which all clients share.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	inference "headrace/inference/v1"
)

const deadline = 60 * time.Second

// bearer sends an API key with every call.
type bearer string

func (key bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(key)}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

// options returns TLS where an authority is named, then the API key, and retries where the service config is named.
func options() ([]grpc.DialOption, error) {
	authority, keyFile := os.Getenv("HEADRACE_TLS_AUTHORITY_FILE"), os.Getenv("HEADRACE_API_KEY_FILE")
	var chosen []grpc.DialOption
	if authority == "" {
		if keyFile != "" {
			return nil, errors.New("set HEADRACE_TLS_AUTHORITY_FILE: an API key is not sent in clear")
		}
		chosen = append(chosen, grpc.WithInsecure())
	} else {
		tls, err := credentials.NewClientTLSFromFile(authority, "")
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, grpc.WithTransportCredentials(tls))
	}
	if keyFile != "" {
		key, err := os.ReadFile(keyFile)
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, grpc.WithPerRPCCredentials(bearer(strings.TrimSpace(string(key)))))
	}
	if file := os.Getenv("HEADRACE_SERVICE_CONFIG_FILE"); file != "" {
		config, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, grpc.WithDefaultServiceConfig(string(config)))
	}
	return chosen, nil
}

// codeName returns the name of a code as the gRPC specification writes it.
func codeName(code codes.Code) string {
	names := []string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
		"ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
		"OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}
	if int(code) < len(names) {
		return names[code]
	}
	return code.String()
}

// report prints the status, and the ErrorInfo that the router attaches to it.
func report(err error) int {
	failed := status.Convert(err)
	info := &errdetails.ErrorInfo{Reason: "-"}
	for _, detail := range failed.Details() {
		if found, ok := detail.(*errdetails.ErrorInfo); ok {
			info = found
		}
	}
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", codeName(failed.Code()), info.Reason, failed.Message())
	for key, value := range info.Metadata {
		fmt.Fprintf(os.Stderr, "  %s: %s\n", key, value)
	}
	return 1
}

func chat(endpoint, prompt string, maxTokens uint32, cancelAfter int) int {
	chosen, err := options()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	connection, err := grpc.Dial(endpoint, chosen...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	defer connection.Close()

	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	stream, err := inference.NewInferenceServiceClient(connection).Generate(ctx, &inference.GenerateRequest{
		Chat:     &inference.Chat{Messages: []*inference.ChatMessage{{Role: "user", Content: prompt}}},
		Sampling: &inference.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Uint32(maxTokens)},
	})
	if err != nil {
		return report(err)
	}
	for received := 0; ; {
		response, err := stream.Recv()
		if err == io.EOF {
			return 0
		}
		if err != nil {
			if cancelAfter > 0 && status.Code(err) == codes.Canceled {
				fmt.Fprintf(os.Stderr, "\nCANCELLED after %d messages\n", received)
				return 0
			}
			return report(err)
		}
		fmt.Print(response.Text)
		if usage := response.Usage; usage != nil {
			fmt.Fprintf(os.Stderr, "\n%s prompt=%d completion=%d transferred=%d\n",
				response.FinishReason, usage.PromptTokens, usage.CompletionTokens, usage.TransferredTokens)
		}
		if received++; received == cancelAfter {
			cancel()
		}
	}
}

func main() {
	arguments := os.Args[1:]
	if len(arguments) < 2 || len(arguments) > 4 {
		fmt.Fprintln(os.Stderr, "usage: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]")
		os.Exit(2)
	}
	numbers := []uint64{32, 0}
	for index, text := range arguments[2:] {
		number, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		numbers[index] = number
	}
	os.Exit(chat(arguments[0], arguments[1], uint32(numbers[0]), int(numbers[1])))
}
