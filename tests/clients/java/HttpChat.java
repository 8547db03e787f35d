// Chats through the JDK's own HTTP client: java HttpChat.java http://HOST:PORT
// By default the client offers an upgrade to HTTP/2 in its first request. Prints the status of each answer.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

public final class HttpChat {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(10)).build();
        for (String stream : new String[] {"false", "true"}) {
            String body = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 8, \"stream\": "
                + stream + "}";
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json")
                .timeout(Duration.ofSeconds(30))
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            String end = stream.equals("true") ? "data: [DONE]\n\n" : "}";
            System.out.println(response.statusCode() + " " + response.body().endsWith(end));
        }
    }
}
