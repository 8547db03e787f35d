//! One server-streaming gRPC call over HTTP/2: what a gRPC library does, for one method.
use std::pin::Pin;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::HeaderMap;
use openssl::ssl::{SslConnector, SslMethod};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_openssl::SslStream;

pub type Failure = Box<dyn std::error::Error>;

// A flag for compression and the length in four bytes.
const PREFIX_BYTES: usize = 5;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const CODES: [&str; 17] = [
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
];

/// The end of a call.
pub struct Status {
    pub code: &'static str,
    pub message: String,
    /// A serialized google.rpc.Status. Empty without one.
    pub details: Vec<u8>,
    /// The pause after which the server permits another attempt.
    pub pushback: Option<Duration>,
}

impl Status {
    fn of(trailers: &HeaderMap) -> Status {
        let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok());
        let number: usize = text("grpc-status").and_then(|code| code.parse().ok()).unwrap_or(2);
        let pushback = text("grpc-retry-pushback-ms").and_then(|ms| ms.parse().ok());
        Status {
            code: CODES.get(number).copied().unwrap_or("UNKNOWN"),
            message: unescaped(text("grpc-message").unwrap_or("")),
            details: text("grpc-status-details-bin").map(from_base64).unwrap_or_default(),
            pushback: pushback.map(Duration::from_millis),
        }
    }
}

/// gRPC sends bytes beyond ASCII as %XX.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let escaped = (first == b'%' && after.len() >= 2)
            .then(|| std::str::from_utf8(&after[..2]).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok()))
            .flatten();
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// gRPC omits the padding.
fn from_base64(text: &str) -> Vec<u8> {
    let padding = "=".repeat((4 - text.len() % 4) % 4);
    openssl::base64::decode_block(&format!("{}{padding}", text.trim_end_matches('='))).unwrap_or_default()
}

trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// Connects with TLS where `authority` names a file of certificates.
async fn connect(endpoint: &str, authority: &str) -> Result<Box<dyn Connection>, Failure> {
    let tcp = TcpStream::connect(endpoint).await?;
    if authority.is_empty() {
        return Ok(Box::new(tcp));
    }
    let mut builder = SslConnector::builder(SslMethod::tls())?;
    builder.set_ca_file(authority)?;
    builder.set_alpn_protos(b"\x02h2")?;
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let mut tls = SslStream::new(builder.build().configure()?.into_ssl(host)?, tcp)?;
    Pin::new(&mut tls).connect().await?;
    Ok(Box::new(tls))
}

/// A call in progress.
pub struct Call {
    request: h2::SendStream<Bytes>,
    response: h2::RecvStream,
    headers: HeaderMap,
    received: BytesMut,
    connection: tokio::task::JoinHandle<Result<(), h2::Error>>,
}

impl Call {
    /// Sends one message to `method`. `key`: sent as a bearer token, where it is not empty.
    pub async fn start(
        endpoint: &str,
        authority: &str,
        key: &str,
        method: &str,
        deadline: Duration,
        message: &[u8],
    ) -> Result<Call, Failure> {
        let (client, connection) = h2::client::handshake(connect(endpoint, authority).await?).await?;
        let connection = tokio::spawn(connection);
        let scheme = if authority.is_empty() { "http" } else { "https" };
        let mut request = http::Request::post(format!("{scheme}://{endpoint}{method}"))
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .header("grpc-timeout", format!("{}m", deadline.as_millis()));
        if !key.is_empty() {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let (response, mut stream) = client.ready().await?.send_request(request.body(())?, false)?;
        let mut framed = BytesMut::with_capacity(PREFIX_BYTES + message.len());
        framed.put_u8(0);
        framed.put_u32(message.len() as u32);
        framed.put_slice(message);
        stream.send_data(framed.freeze(), true)?;
        let response = response.await?;
        let headers = response.headers().clone();
        let (response, received) = (response.into_body(), BytesMut::new());
        Ok(Call { request: stream, response, headers, received, connection })
    }

    /// The next message, or none at the end of the answer.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            if self.received.len() >= PREFIX_BYTES {
                let length = (&self.received[1..]).get_u32() as usize;
                if self.received.len() >= PREFIX_BYTES + length {
                    self.received.advance(PREFIX_BYTES);
                    return Ok(Some(self.received.split_to(length).freeze()));
                }
            }
            match self.response.data().await {
                Some(data) => {
                    let data = data?;
                    self.response.flow_control().release_capacity(data.len())?;
                    self.received.extend_from_slice(&data);
                }
                None => return Ok(None),
            }
        }
    }

    /// How the call ended, after the last message. Without messages, the headers state it.
    pub async fn status(mut self) -> Result<Status, Failure> {
        let trailers = self.response.trailers().await?;
        Ok(Status::of(trailers.as_ref().unwrap_or(&self.headers)))
    }

    /// Returns when the server has been sent the reset.
    pub async fn cancel(self) {
        let Call { mut request, response, connection, .. } = self;
        request.send_reset(h2::Reason::CANCEL);
        // A connection without streams ends.
        drop((request, response));
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, connection).await;
    }
}
