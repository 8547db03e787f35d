//! Chats with a Headrace router: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]
//! docs/clients.md describes the arguments, the environment and the output, which all clients share.
mod call;

use std::io::Write;
use std::time::{Duration, Instant};

use prost::Message;

use call::{Call, Failure, Status};
use google::rpc::ErrorInfo;
use inference::{Chat, ChatMessage, FinishReason, GenerateRequest, GenerateResponse, SamplingParams};

mod inference {
    include!(concat!(env!("OUT_DIR"), "/headrace.inference.v1.rs"));
}

mod google {
    pub mod rpc {
        include!(concat!(env!("OUT_DIR"), "/google.rpc.rs"));
    }
}

const DEADLINE: Duration = Duration::from_secs(60);
const METHOD: &str = "/headrace.inference.v1.InferenceService/Generate";

fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Attempts and the codes that permit another one, by the service config.
struct RetryPolicy {
    attempts: u64,
    codes: Vec<String>,
}

impl RetryPolicy {
    /// One attempt, where no service config is named.
    fn load() -> Result<RetryPolicy, Failure> {
        let file = setting("HEADRACE_SERVICE_CONFIG_FILE");
        if file.is_empty() {
            return Ok(RetryPolicy { attempts: 1, codes: Vec::new() });
        }
        let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
        let policy = &config["methodConfig"][0]["retryPolicy"];
        let codes = policy["retryableStatusCodes"].as_array().ok_or("no retryableStatusCodes")?;
        Ok(RetryPolicy {
            attempts: policy["maxAttempts"].as_u64().ok_or("no maxAttempts")?,
            codes: codes.iter().filter_map(|code| code.as_str().map(String::from)).collect(),
        })
    }

    /// The pause before another attempt. None: there must be none.
    fn pause(&self, attempt: u64, status: &Status) -> Option<Duration> {
        let permitted = attempt < self.attempts && self.codes.iter().any(|code| code == status.code);
        if permitted { status.pushback } else { None }
    }
}

/// The ErrorInfo that the router attaches to an error. Empty without one.
fn error_info(status: &Status) -> ErrorInfo {
    let details = google::rpc::Status::decode(status.details.as_slice()).unwrap_or_default().details;
    details
        .iter()
        .find(|detail| detail.type_url.ends_with("/google.rpc.ErrorInfo"))
        .and_then(|detail| ErrorInfo::decode(detail.value.as_slice()).ok())
        .unwrap_or_default()
}

fn report(status: &Status) -> i32 {
    let info = error_info(status);
    let reason = if info.reason.is_empty() { "-" } else { &info.reason };
    eprintln!("{} {reason}: {}", status.code, status.message);
    for (key, value) in &info.metadata {
        eprintln!("  {key}: {value}");
    }
    1
}

fn request(prompt: &str, max_tokens: u32) -> GenerateRequest {
    let message = ChatMessage { role: "user".into(), content: prompt.into(), ..Default::default() };
    GenerateRequest {
        chat: Some(Chat { messages: vec![message], ..Default::default() }),
        sampling: Some(SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(max_tokens),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn print(response: &GenerateResponse) -> std::io::Result<()> {
    print!("{}", response.text);
    std::io::stdout().flush()?;
    if let Some(usage) = &response.usage {
        let finish = FinishReason::from_i32(response.finish_reason).unwrap_or_default();
        eprintln!(
            "\n{} prompt={} completion={} transferred={}",
            finish.as_str_name(), usage.prompt_tokens, usage.completion_tokens, usage.transferred_tokens
        );
    }
    Ok(())
}

async fn chat(endpoint: &str, request: GenerateRequest, cancel_after: u32) -> Result<i32, Failure> {
    let authority = setting("HEADRACE_TLS_AUTHORITY_FILE");
    let key_file = setting("HEADRACE_API_KEY_FILE");
    if authority.is_empty() && !key_file.is_empty() {
        return Err("set HEADRACE_TLS_AUTHORITY_FILE: an API key is not sent in clear".into());
    }
    let key = if key_file.is_empty() { String::new() } else { std::fs::read_to_string(key_file)? };
    let policy = RetryPolicy::load()?;
    let message = request.encode_to_vec();
    let end = Instant::now() + DEADLINE;
    for attempt in 1.. {
        let left = end.saturating_duration_since(Instant::now());
        let mut call = Call::start(endpoint, &authority, key.trim(), METHOD, left, &message).await?;
        let mut received = 0;
        while let Some(bytes) = call.next().await? {
            print(&GenerateResponse::decode(bytes)?)?;
            received += 1;
            if received == cancel_after {
                call.cancel().await;
                eprintln!("\nCANCELLED after {received} messages");
                return Ok(0);
            }
        }
        let status = call.status().await?;
        if status.code == "OK" {
            return Ok(0);
        }
        match policy.pause(attempt, &status) {
            Some(pause) if received == 0 && Instant::now() + pause < end => tokio::time::sleep(pause).await,
            _ => return Ok(report(&status)),
        }
    }
    unreachable!("a policy bounds the attempts");
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if !(3..=5).contains(&arguments.len()) {
        eprintln!("usage: chat HOST:PORT PROMPT [MAX_TOKENS [CANCEL_AFTER]]");
        std::process::exit(2);
    }
    let number = |index: usize, other: u32| arguments.get(index).map_or(Ok(other), |text| text.parse());
    let exit_status = match (number(3, 32), number(4, 0)) {
        (Ok(max_tokens), Ok(cancel_after)) => {
            chat(&arguments[1], request(&arguments[2], max_tokens), cancel_after).await.unwrap_or_else(|error| {
                eprintln!("{error}");
                2
            })
        }
        _ => {
            eprintln!("MAX_TOKENS and CANCEL_AFTER are numbers");
            2
        }
    };
    std::process::exit(exit_status);
}
