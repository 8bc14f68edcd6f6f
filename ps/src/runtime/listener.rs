//! Where a server listens. The port is bound before the server is configured, so that port 0
//! works: the address goes into the cluster spec.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::error::ListenError;

/// Connections that the system completes and keeps until they are accepted; it takes fewer where
/// `somaxconn` is lower. One that finds it full tries again after a second.
const BACKLOG: i32 = 4096;

/// Bound addresses on which nobody is served yet.
#[derive(Debug)]
pub struct Listener {
    pub(super) endpoints: Vec<Endpoint>,
}

#[derive(Debug)]
pub(super) enum Endpoint {
    Tcp(TcpListener, SocketAddr),
    Unix(UnixListener, SocketFile),
}

/// A Unix socket's file, removed when the listener is gone, if it is still the same file.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Its device and inode.
    identity: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<SocketFile> {
        let metadata = path.symlink_metadata()?;
        Ok(SocketFile { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino()) == self.identity;
        if self.path.symlink_metadata().is_ok_and(same) {
            // Nobody is left to tell; the next server replaces a socket that nobody listens on.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    pub(super) fn bind(address: &str, insecure: bool) -> Result<Listener, ListenError> {
        let endpoint = match address.strip_prefix("unix:") {
            Some(path) => bind_unix(address, Path::new(path))?,
            None => bind_tcp(address, insecure)?,
        };
        Ok(Listener { endpoints: vec![endpoint] })
    }

    /// Listens on one more address: a Unix socket for workers on the same host, say.
    pub fn also(mut self, other: Listener) -> Listener {
        self.endpoints.extend(other.endpoints);
        self
    }

    /// The first address, as it belongs into a cluster spec: `host:port` with the real port, or
    /// `unix:/path`.
    pub fn address(&self) -> String {
        self.addresses().into_iter().next().unwrap_or_default()
    }

    /// The first Unix socket.
    pub(super) fn unix_address(&self) -> Option<String> {
        self.addresses().into_iter().find(|address| address.starts_with("unix:"))
    }

    /// All addresses.
    pub fn addresses(&self) -> Vec<String> {
        let address = |endpoint: &Endpoint| match endpoint {
            Endpoint::Tcp(_, address) => address.to_string(),
            Endpoint::Unix(_, file) => format!("unix:{}", file.path.display()),
        };
        self.endpoints.iter().map(address).collect()
    }
}

fn bind_tcp(address: &str, insecure: bool) -> Result<Endpoint, ListenError> {
    let named = || address.to_owned();
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
            Err(error) => last = listen_error(address, error),
        }
    }
    Err(last)
}

fn bind_resolved(address: SocketAddr) -> io::Result<Endpoint> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A port that a stopped server's connections still linger on is free.
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
        // The file of a server that was killed: nobody answers behind it.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_orphan(path) => {
            std::fs::remove_file(path)
                .and_then(|()| bind())
                .map_err(|error| listen_error(address, error))
        }
        result => result.map_err(|error| listen_error(address, error)),
    }
}

/// Whether the file is a socket that nobody listens on. Any other file is somebody's, and refuses
/// a connection just the same.
fn is_orphan(path: &Path) -> bool {
    let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    let connect = || -> io::Result<()> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // A living server whose backlog is full must not hold us up.
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
