//! Bound server addresses. The port is bound before the server is configured, so that a cluster
//! spec can contain the real port when port 0 was requested.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use pushpull_common::cluster::without_scheme;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::home_process::HomeProcess;
use crate::listen_error::ListenError;
use crate::socket_path::{occupant, socket_path};

/// The requested backlog; the kernel caps it at `somaxconn`. A client that finds it full retries
/// after a second.
const BACKLOG: i32 = 4096;

/// Bound addresses that are not served yet.
#[derive(Debug)]
pub struct Endpoints {
    pub(crate) all: Vec<Endpoint>,
}

#[derive(Debug)]
pub(crate) enum Endpoint {
    Tcp(TcpListener, SocketAddr),
    Unix(UnixListener, SocketFile),
}

/// A Unix socket's file, removed when the listener is dropped if it is still the same file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// The file's device and inode.
    identity: (u64, u64),
    /// A child of `fork` does not remove the socket of its parent.
    home: HomeProcess,
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<SocketFile> {
        let metadata = path.symlink_metadata()?;
        let identity = (metadata.dev(), metadata.ino());
        Ok(SocketFile { path: path.to_owned(), identity, home: HomeProcess::current() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino()) == self.identity;
        if !self.home.is_elsewhere() && self.path.symlink_metadata().is_ok_and(same) {
            // A failure cannot be reported here; the next server replaces an orphaned socket.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Endpoints {
    /// Binds an address: `host:port`, which may be written `grpc://host:port`, or `unix:/path`. Port
    /// 0 takes a free one. `insecure` allows an address that other machines can reach.
    ///
    /// # Errors
    /// Every [`ListenError`].
    pub fn bind(address: &str, insecure: bool) -> Result<Endpoints, ListenError> {
        let address = without_scheme(address);
        let endpoint = match socket_path(address) {
            Some(path) => bind_unix(address, Path::new(path))?,
            None => bind_tcp(address, insecure)?,
        };
        Ok(Endpoints { all: vec![endpoint] })
    }

    /// Adds other addresses, for example a Unix socket for workers on the same
    /// host.
    pub fn also(mut self, other: Endpoints) -> Endpoints {
        self.all.extend(other.all);
        self
    }

    /// Returns the first address as a cluster spec names it: `host:port` with the real port, or
    /// `unix:/path`.
    pub fn address(&self) -> String {
        self.addresses().into_iter().next().unwrap_or_default()
    }

    /// Returns the first Unix socket address.
    pub fn unix_address(&self) -> Option<String> {
        self.addresses().into_iter().find(|address| address.starts_with("unix:"))
    }

    /// Returns all addresses.
    pub fn addresses(&self) -> Vec<String> {
        let address = |endpoint: &Endpoint| match endpoint {
            Endpoint::Tcp(_, address) => address.to_string(),
            Endpoint::Unix(_, file) => format!("unix:{}", file.path.display()),
        };
        self.all.iter().map(address).collect()
    }
}

fn bind_tcp(address: &str, insecure: bool) -> Result<Endpoint, ListenError> {
    let named = || address.to_owned();
    // A resolver would be asked for `http://host`.
    if address.contains('/') {
        return Err(ListenError::Address { address: named() });
    }
    let resolved = address.to_socket_addrs().map_err(|source| match source.kind() {
        io::ErrorKind::InvalidInput => ListenError::Address { address: named() },
        _ => ListenError::Io { address: named(), source },
    })?;
    let mut last = ListenError::Address { address: named() };
    for resolved in resolved {
        if !insecure && !resolved.ip().is_loopback() {
            return Err(ListenError::Exposed { address: named() });
        }
        match bind_resolved(resolved) {
            Ok(endpoint) => return Ok(endpoint),
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                last = ListenError::Elsewhere { address: named(), found: resolved.ip() };
            }
            Err(error) => last = listen_error(address, error),
        }
    }
    Err(last)
}

fn bind_resolved(address: SocketAddr) -> io::Result<Endpoint> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Allows a port on which connections of a stopped server linger.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    let listener: TcpListener = socket.into();
    let bound = listener.local_addr()?;
    Ok(Endpoint::Tcp(listener, bound))
}

fn bind_unix(address: &str, path: &Path) -> Result<Endpoint, ListenError> {
    if path.as_os_str().is_empty() {
        return Err(ListenError::Address { address: address.to_owned() });
    }
    let bind = || -> io::Result<Endpoint> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Endpoint::Unix(listener, SocketFile::new(path)?))
    };
    match bind() {
        // The file of a killed server: no process listens on it.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_orphan(path) => {
            std::fs::remove_file(path)
                .and_then(|()| bind())
                .map_err(|error| listen_error(address, error))
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match occupant(path) {
            Some(found) => Err(ListenError::Occupied { address: address.to_owned(), found }),
            None => Err(listen_error(address, error)),
        },
        result => result.map_err(|error| listen_error(address, error)),
    }
}

/// Whether the file is a socket that no process listens on. A file of another type also refuses a
/// connection, but is not ours to remove.
fn is_orphan(path: &Path) -> bool {
    let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    let connect = || -> io::Result<()> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // A running server whose backlog is full must not block this call.
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    is_socket && connect().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn listen_error(address: &str, source: io::Error) -> ListenError {
    let address = address.to_owned();
    match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse { address },
        _ => ListenError::Io { address, source },
    }
}
