//! [`Connector`]: connects to one server, under whichever address of its name answers.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::cluster::without_scheme;
use pushpull_common::ids::TaskId;
use thiserror::Error;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;

use crate::Stream;
use crate::auth::Credentials;
use crate::auth::everywhere::in_effect;
use crate::connect_race::{AttemptEnd, ConnectRace, KnownAddresses, RaceStep};
use crate::socket_path::{occupant, socket_path};

/// The most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 64;

/// Connects to the server at one address: `host:port`, which may be written `grpc://host:port`, or
/// `unix:/path`.
///
/// A host name is resolved for each connection, because a server may come back on another address.
/// Of several addresses, the next is tried 250 ms after the last or when that has failed, and the
/// first that accepts wins. The connector remembers which address was silent and which server has
/// answered, so a silent address delays one connection, not all.
#[derive(Debug)]
pub struct Connector {
    address: String,
    known: Mutex<KnownAddresses>,
    credentials: Option<Credentials>,
    /// The task of the server, if it is known.
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "its certificate names it"))]
    task: Option<TaskId>,
}

/// A connection that a [`Connector`] has made.
#[derive(Debug)]
pub struct Connected {
    /// The connection.
    pub stream: Stream,
    /// The internet address of the server; see [`Connector::answered`].
    pub address: Option<SocketAddr>,
}

/// The reason why a server was not reached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The address is not `host:port`, `[v6]:port` or `unix:/path`.
    #[error("cannot connect to {address:?}: it is neither host:port, [v6]:port nor unix:/path")]
    Address {
        /// The address.
        address: String,
    },
    /// The host name has no address, as far as the resolver knows.
    #[error("cannot resolve {address:?}")]
    Unresolved {
        /// The address.
        address: String,
        /// The error of the resolver.
        source: io::Error,
    },
    /// No address of the name has accepted.
    #[error("{}", NotReached { address, limit, attempts })]
    NotReached {
        /// The address.
        address: String,
        /// The time in which none has.
        limit: Duration,
        /// The addresses of the name, and what became of the attempt to connect to each.
        attempts: Vec<(SocketAddr, AttemptEnd)>,
    },
    /// The path of a Unix socket belongs to something else, so no server can listen there.
    #[error("a {found} has the path of {address}, which must be a socket")]
    Occupied {
        /// The address.
        address: String,
        /// The kind of thing that has the path, such as a plain file.
        found: &'static str,
    },
    /// The server has accepted, and there is no TLS with it.
    #[error("cannot speak TLS with {address}")]
    Tls {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The Unix socket has not accepted.
    #[error(transparent)]
    Unix {
        /// The error of the operating system.
        source: io::Error,
    },
}

impl ConnectError {
    /// Whether somebody must be told at once: the address means no server, because its name is
    /// misspelt or not registered yet or its path is no socket; or there is no TLS with the server.
    pub fn is_misconfigured(&self) -> bool {
        use ConnectError::{Occupied, Tls, Unresolved};
        matches!(self, Unresolved { .. } | Occupied { .. } | Tls { .. })
    }
}

/// The text of [`ConnectError::NotReached`].
struct NotReached<'a> {
    address: &'a str,
    limit: &'a Duration,
    attempts: &'a [(SocketAddr, AttemptEnd)],
}

impl fmt::Display for NotReached<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotReached { address, limit, attempts } = *self;
        let describe = |end: &AttemptEnd| match end {
            AttemptEnd::Silent => format!("no answer within {limit:?}"),
            end => end.to_string(),
        };
        match attempts {
            // The address says it all.
            [(only, end)] if address == only.to_string() => f.write_str(&describe(end)),
            attempts => {
                let one = |(address, end): &(SocketAddr, AttemptEnd)| {
                    format!("{address}: {}", describe(end))
                };
                let ends: Vec<String> = attempts.iter().map(one).collect();
                write!(f, "no address of {address} accepts: {}", ends.join("; "))
            }
        }
    }
}

impl Connector {
    /// The limit on one attempt to connect, over all addresses of the name.
    pub const LIMIT: Duration = Duration::from_secs(5);

    /// Returns a connector to this address. Nothing is resolved yet.
    pub fn new(address: &str) -> Connector {
        Connector {
            address: without_scheme(address).to_owned(),
            known: Mutex::default(),
            credentials: in_effect(None),
            task: None,
        }
    }

    /// Connects with these credentials: over TLS if they have an authority. Default: none.
    #[must_use]
    pub fn credentials(self, credentials: Option<Credentials>) -> Connector {
        Connector { credentials: in_effect(credentials.as_ref()), ..self }
    }

    /// Names the task that the server must be, which its certificate may name. Default: any that its
    /// host may be.
    #[must_use]
    pub fn task(self, task: TaskId) -> Connector {
        Connector { task: Some(task), ..self }
    }

    /// Returns the credentials of this side.
    pub fn own_credentials(&self) -> Option<&Credentials> {
        self.credentials.as_ref()
    }

    /// Returns the address, without the scheme.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Checks that something else than a socket does not have the path of a Unix socket. Resolves
    /// nothing.
    ///
    /// # Errors
    /// [`ConnectError::Occupied`].
    pub fn check_path(&self) -> Result<(), ConnectError> {
        let address = || self.address.clone();
        match socket_path(&self.address).and_then(|path| occupant(Path::new(path))) {
            Some(found) => Err(ConnectError::Occupied { address: address(), found }),
            None => Ok(()),
        }
    }

    /// Connects within `limit`. Cancel-safe.
    ///
    /// # Errors
    /// Every [`ConnectError`].
    pub async fn connect(&self, limit: Duration) -> Result<Connected, ConnectError> {
        let begun = Instant::now();
        if let Some(path) = socket_path(&self.address) {
            let connected = match tokio::time::timeout(limit, UnixStream::connect(path)).await {
                Ok(connected) => connected.and_then(Stream::unix).and_then(|it| self.own_user(it)),
                Err(_) => Err(io::ErrorKind::TimedOut.into()),
            };
            let stream = match connected {
                Ok(stream) => stream,
                Err(source) => {
                    self.check_path()?;
                    return Err(ConnectError::Unix { source });
                }
            };
            return Ok(Connected { stream, address: None });
        }
        let resolved = self.resolve(limit).await?;
        let addresses = self.known().order(resolved);
        let left = || limit.saturating_sub(begun.elapsed());
        let connected = self.race(&addresses, left(), limit).await?;
        self.secure(connected, left()).await
    }

    /// Shakes hands with the server that has accepted, if this side has an authority.
    #[cfg(feature = "tls")]
    async fn secure(
        &self,
        connected: Connected,
        left: Duration,
    ) -> Result<Connected, ConnectError> {
        let current = self.credentials.as_ref().map(Credentials::fresh);
        let Some(client) = current.and_then(|current| current.tls.client.clone()) else {
            return Ok(connected);
        };
        let Connected { stream, address } = connected;
        let host = split_port(&self.address).map_or("", |(host, _)| host);
        let connecting = client.connect(stream, host, self.task.clone());
        let error = match tokio::time::timeout(left, connecting).await {
            Ok(Ok(stream)) => return Ok(Connected { stream, address }),
            Ok(Err(error)) => error.into(),
            Err(_) => io::Error::from(io::ErrorKind::TimedOut),
        };
        Err(ConnectError::Tls { address: self.address.clone(), source: error })
    }

    #[cfg(not(feature = "tls"))]
    async fn secure(&self, connected: Connected, _: Duration) -> Result<Connected, ConnectError> {
        Ok(connected)
    }

    /// Refuses a Unix socket that another user serves, if this side wants to know whom it speaks with.
    fn own_user(&self, stream: Stream) -> io::Result<Stream> {
        match self.credentials.is_some() && stream.is_of_another_user() {
            true => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "a process of another user listens there",
            )),
            false => Ok(stream),
        }
    }

    /// Records that the server at an address has sent something. Until then the address counts as
    /// silent: it may accept connections that nobody serves.
    pub fn answered(&self, address: Option<SocketAddr>) {
        if let Some(address) = address {
            self.known().answered(address);
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownAddresses> {
        // It is valid after each call.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn resolve(&self, limit: Duration) -> Result<Vec<SocketAddr>, ConnectError> {
        let Some((host, port)) = split_port(&self.address) else {
            return Err(ConnectError::Address { address: self.address.clone() });
        };
        let lookup = tokio::net::lookup_host((host, port));
        let resolved = match tokio::time::timeout(limit, lookup).await {
            Ok(resolved) => resolved.map(|all| all.take(ADDRESSES_MAX).collect::<Vec<_>>()),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the resolver has not answered within {limit:?}"),
            )),
        };
        let resolved = match resolved {
            Ok(all) if all.is_empty() => Err(io::Error::other("the name has no address")),
            resolved => resolved,
        };
        let address = self.address.clone();
        resolved.map_err(|source| ConnectError::Unresolved { address, source })
    }

    /// Tries the addresses in order for the time that is left of the limit.
    async fn race(
        &self,
        addresses: &[SocketAddr],
        left: Duration,
        limit: Duration,
    ) -> Result<Connected, ConnectError> {
        let mut race = ConnectRace::new(Instant::now(), addresses, left);
        let mut attempts = JoinSet::new();
        let won = loop {
            let until = match race.poll(Instant::now()) {
                RaceStep::Start(index) => {
                    let address = race.address(index);
                    attempts.spawn(async move { (index, connect_tcp(address).await) });
                    continue;
                }
                RaceStep::Wait(until) => until,
                RaceStep::Lost => break None,
            };
            match tokio::time::timeout_at(until.into(), attempts.join_next()).await {
                Ok(Some(Ok((index, Ok(stream))))) => break Some((index, stream)),
                Ok(Some(Ok((index, Err(error))))) => {
                    race.failed(Instant::now(), index, error.to_string());
                }
                // An attempt neither panics nor is aborted while the set is polled.
                Ok(Some(Err(_)) | None) => break None,
                // The race knows what is due.
                Err(_) => {}
            }
        };
        let mut known = self.known();
        race.silent().for_each(|address| known.silent(address));
        match won {
            Some((index, stream)) => {
                let address = race.address(index);
                Ok(Connected { stream, address: Some(address) })
            }
            None => Err(ConnectError::NotReached {
                address: self.address.clone(),
                limit,
                attempts: race.into_attempts(),
            }),
        }
    }
}

async fn connect_tcp(address: SocketAddr) -> io::Result<Stream> {
    Stream::tcp(not_itself(TcpStream::connect(address).await?)?)
}

/// Refuses a stream that has connected to itself: while a server on this host is down, the system
/// may pick its port as the source port. Such a stream would hold the port that its server needs.
fn not_itself(stream: TcpStream) -> io::Result<TcpStream> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

/// Returns the host and the port of an address.
fn split_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(v6) => v6.strip_suffix(']').filter(|v6| v6.parse::<std::net::Ipv6Addr>().is_ok())?,
        None => Some(host).filter(|host| !host.contains([':', '/', ' ']))?,
    };
    let port = port.parse().ok().filter(|&port| port > 0)?;
    (!host.is_empty()).then_some((host, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use pushpull_common::error::Chain;
    use socket2::{Domain, Socket, Type};
    use tokio::net::TcpSocket;

    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    /// An address whose backlog is full, so that it neither accepts nor refuses, with the sockets
    /// that keep it so.
    fn silent_address(host: [u8; 4]) -> (SocketAddr, Vec<Socket>) {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SocketAddr::from((host, 0)).into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut kept = vec![listener];
        for _ in 0..4 {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let _ = socket.connect(&address.into());
            kept.push(socket);
        }
        (address, kept)
    }

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[test]
    fn a_silent_first_address_keeps_nobody_from_the_second() {
        let (silent, _kept) = silent_address([127, 0, 0, 8]);
        let (_listener, serving) = listener();
        let connector = Connector::new("two.addresses:1");
        let limit = Duration::from_secs(20);
        block_on(async {
            let both = [silent, serving];
            let connected = connector.race(&both, limit, limit).await.unwrap();
            assert_eq!(connected.address, Some(serving));
            connector.answered(connected.address);
            // The next connection begins with the address that has answered.
            assert_eq!(connector.known().order(both.to_vec()), [serving, silent]);
        });
    }

    #[test]
    fn an_address_that_accepts_and_says_nothing_is_tried_last() {
        let (_silent, first) = listener();
        let (_serving, second) = listener();
        let connector = Connector::new("two.addresses:1");
        let limit = Duration::from_secs(20);
        let connected = block_on(connector.race(&[first, second], limit, limit)).unwrap();
        assert_eq!(connected.address, Some(first));
        assert_eq!(connector.known().order(vec![first, second]), [second, first]);
    }

    #[test]
    fn an_error_names_the_server_and_each_address() {
        let (silent, _kept) = silent_address([127, 0, 0, 8]);
        let refusing = listener().1;
        let connector = Connector::new("two.addresses:1");
        let limit = Duration::from_millis(50);
        let error = block_on(connector.race(&[silent, refusing], limit, limit)).unwrap_err();
        let expected = format!(
            "no address of two.addresses:1 accepts: {silent}: no answer within 50ms; {refusing}: \
             Connection refused (os error 111)"
        );
        assert_eq!(error.to_string(), expected);
        let error = block_on(Connector::new(&refusing.to_string()).connect(limit)).unwrap_err();
        assert_eq!(error.to_string(), "Connection refused (os error 111)");
        assert!(!error.is_misconfigured());
    }

    #[test]
    fn a_name_that_means_nothing_is_misconfigured() {
        let connector = Connector::new("no-such-host.invalid:1");
        let error = block_on(connector.connect(Duration::from_secs(60))).unwrap_err();
        assert!(error.is_misconfigured(), "{error:?}");
        let text = Chain(&error).to_string();
        assert!(text.starts_with("cannot resolve \"no-such-host.invalid:1\": "), "{text}");
    }

    #[test]
    fn a_path_that_is_no_socket_is_refused_by_what_it_is() {
        let file = std::env::temp_dir().join(format!("pushpull-file-{}", std::process::id()));
        std::fs::write(&file, "").unwrap();
        let address = format!("unix:{}", file.display());
        let connector = Connector::new(&address);
        let checked = connector.check_path().unwrap_err().to_string();
        let error = block_on(connector.connect(Connector::LIMIT)).unwrap_err();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(
            checked,
            format!("a plain file has the path of {address}, which must be a socket")
        );
        assert!(error.is_misconfigured() && error.to_string() == checked, "{error}");
        // A server may still come.
        assert!(connector.check_path().is_ok());
        let error = block_on(connector.connect(Connector::LIMIT)).unwrap_err();
        assert!(matches!(error, ConnectError::Unix { .. }), "{error}");
    }

    #[test]
    fn a_target_may_have_the_classic_scheme() {
        let (_listener, address) = listener();
        for target in [address.to_string(), format!("grpc://{address}")] {
            let connected = block_on(Connector::new(&target).connect(Connector::LIMIT)).unwrap();
            assert_eq!(connected.address, Some(address), "{target}");
        }
        let bad =
            ["", "a", "a:", ":1", "a:0", "a:65536", "http://a:1", "grpc://", "grpc://grpc://a:1"];
        for address in bad.into_iter().chain(["unix:", "::1:80", "[::1]", "[a]:1", "grpc:///:1"]) {
            let error = block_on(Connector::new(address).connect(Connector::LIMIT)).unwrap_err();
            assert!(matches!(error, ConnectError::Address { .. } | ConnectError::Unix { .. }));
        }
    }

    #[test]
    fn a_stream_that_has_connected_to_itself_is_refused() {
        block_on(async {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let own = socket.local_addr().unwrap();
            let error = not_itself(socket.connect(own).await.unwrap()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        });
    }
}
