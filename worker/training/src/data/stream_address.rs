//! [`StreamAddress`]: where a stream of records comes from.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::StreamError;

/// The origin of a stream of records. As a text: `-`, `unix:PATH` or `tcp:HOST:PORT`.
///
/// The program that has the records listens at a socket, and this one connects to it. The peer of a
/// TCP socket is not authenticated, and the records are not encrypted.
///
/// ```
/// use pushpull_training::data::StreamAddress;
///
/// let stdin: StreamAddress = "-".parse()?;
/// assert_eq!(stdin, StreamAddress::Stdin);
/// let socket: StreamAddress = "unix:/run/share-0".parse()?;
/// assert_eq!(socket, StreamAddress::Unix("/run/share-0".into()));
/// assert_eq!(StreamAddress::Tcp("localhost:9000".into()).to_string(), "tcp:localhost:9000");
/// # Ok::<(), pushpull_training::data::StreamError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamAddress {
    /// The standard input of this process.
    Stdin,
    /// A Unix socket that listens at this path.
    Unix(PathBuf),
    /// A TCP socket that listens at this host and port.
    Tcp(String),
}

impl StreamAddress {
    /// Opens the stream. Both the wait for a program that listens, and each silence of the open
    /// stream, last at most `silence_max`.
    ///
    /// # Errors
    /// [`StreamError::Open`].
    pub fn open(&self, silence_max: Duration) -> Result<StreamInput, StreamError> {
        let opened = match self {
            StreamAddress::Stdin => io::stdin().as_fd().try_clone_to_owned(),
            StreamAddress::Unix(path) => connect(silence_max, |_| connect_unix(path)),
            StreamAddress::Tcp(host) => connect(silence_max, |left| {
                let mut error = io::Error::from(io::ErrorKind::NotFound);
                let begin = Instant::now();
                for address in host.to_socket_addrs()? {
                    let left = left.saturating_sub(begin.elapsed()).max(PAUSE);
                    match TcpStream::connect_timeout(&address, left) {
                        Ok(stream) => return Ok(OwnedFd::from(stream)),
                        Err(refused) => error = refused,
                    }
                }
                Err(error)
            }),
        };
        match opened {
            Ok(stream) => Ok(StreamInput::new(stream, silence_max)),
            Err(source) => Err(StreamError::Open { address: self.to_string(), source }),
        }
    }
}

impl FromStr for StreamAddress {
    type Err = StreamError;

    fn from_str(text: &str) -> Result<StreamAddress, StreamError> {
        match text.split_once(':') {
            None if text == "-" => Ok(StreamAddress::Stdin),
            Some(("unix", path)) if !path.is_empty() => Ok(StreamAddress::Unix(path.into())),
            Some(("tcp", host)) if host.contains(':') => Ok(StreamAddress::Tcp(host.to_owned())),
            _ => Err(StreamError::Address { address: text.to_owned() }),
        }
    }
}

impl fmt::Display for StreamAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamAddress::Stdin => f.write_str("-"),
            StreamAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            StreamAddress::Tcp(host) => write!(f, "tcp:{host}"),
        }
    }
}

/// An open pipe or socket whose silence ends a read: [`io::ErrorKind::TimedOut`].
#[derive(Debug)]
pub struct StreamInput {
    file: File,
    silence_max: Duration,
}

impl StreamInput {
    /// Uses an open descriptor. A read waits at most `silence_max` for the next byte.
    pub fn new(stream: impl Into<OwnedFd>, silence_max: Duration) -> StreamInput {
        StreamInput { file: File::from(stream.into()), silence_max }
    }

    /// Waits until a read would not wait.
    fn wait(&self) -> io::Result<()> {
        let begin = Instant::now();
        loop {
            let left = self.silence_max.saturating_sub(begin.elapsed());
            // A time beyond what the system can tell has no end.
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], left.as_ref()) {
                Ok(0) => {
                    let silence = format!("it was silent for {:?}", self.silence_max);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, silence));
                }
                Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for StreamInput {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.wait()?;
        self.file.read(out)
    }
}

/// Connects to a program that may start later. `attempt` is called with the time that is left.
fn connect(
    within: Duration,
    attempt: impl Fn(Duration) -> io::Result<OwnedFd>,
) -> io::Result<OwnedFd> {
    let begin = Instant::now();
    loop {
        let left = within.saturating_sub(begin.elapsed()).max(PAUSE);
        match attempt(left) {
            Err(error) if is_absent(&error) && begin.elapsed() + PAUSE < within => {
                std::thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}

/// Connects to a Unix socket, without a wait for a program that listens and accepts nobody.
fn connect_unix(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

/// Whether nothing listens at an address yet, or its queue is full.
fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound, WouldBlock};
    matches!(error.kind(), ConnectionRefused | NotFound | WouldBlock)
}

/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);
