//! Connects to other ranks, and tells those that are gone from those that do not answer.

use pushpull_common::error::Chain;
use pushpull_net::auth::Credentials;
use pushpull_net::{ConnectError, Connector, Stream};

/// A failed attempt to connect.
pub(super) struct Unreached {
    /// The cause, in words.
    pub(super) cause: String,
    /// Whether the failure proves that nobody listens there.
    pub(super) gone: bool,
}

/// Connects to an address.
pub(super) async fn connect(
    address: &str,
    credentials: Option<&Credentials>,
) -> Result<Stream, Unreached> {
    let connector = Connector::new(address).credentials(credentials.cloned());
    match connector.connect(Connector::LIMIT).await {
        Ok(connected) => Ok(connected.stream),
        Err(error) => {
            let gone = match &error {
                ConnectError::Unix { source } => matches!(
                    source.kind(),
                    std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound
                ),
                ConnectError::NotReached { attempts, .. } => {
                    !attempts.is_empty()
                        && attempts.iter().all(|(_, end)| end.to_string().contains("refused"))
                }
                _ => false,
            };
            Err(Unreached { cause: Chain(&error).to_string(), gone })
        }
    }
}

/// Connects to a rank, under the first of its addresses that answers.
pub(super) async fn connect_any<A: AsRef<str>>(
    addresses: &[A],
    credentials: Option<&Credentials>,
) -> Result<Stream, Unreached> {
    let mut last = Unreached { cause: "no address".to_owned(), gone: false };
    for address in addresses {
        match connect(address.as_ref(), credentials).await {
            Ok(stream) => return Ok(stream),
            Err(unreached) => last = unreached,
        }
    }
    Err(last)
}
