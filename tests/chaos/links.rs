//! Links between tasks: a TCP proxy for each pair of tasks, in this process, which can be cut or
//! stalled.
//!
//! Each task gets the addresses of its own proxies, so a fault of a link affects only that pair.
//! Addresses are not part of a cluster's identity, so tasks may have different ones.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The buffer size for forwarding.
const CHUNK: usize = 64 << 10;

/// How long a write may block before the proxy checks whether its connection is cut.
const WRITE_TIMEOUT: Duration = Duration::from_millis(50);

/// How a link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends read the end of the stream after the forwarded bytes.
    Close,
    /// Both ends get a connection reset; bytes in flight are lost.
    Reset,
}

/// The stalled directions of a link. A stalled direction forwards no byte and no end of the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) to_server: bool,
    pub(crate) from_server: bool,
}

impl Stall {
    fn stops(self, to_server: bool) -> bool {
        if to_server { self.to_server } else { self.from_server }
    }
}

/// A link from a task to a server.
#[derive(Debug)]
pub(crate) struct Link {
    /// The address at which the task reaches the server.
    pub(crate) address: String,
    state: Arc<ProxyState>,
}

#[derive(Debug)]
struct ProxyState {
    target: String,
    link_state: Mutex<LinkState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LinkState {
    /// Whether new connections are closed at once.
    down: bool,
    stall: Stall,
    connections: Vec<ForwardedConnection>,
}

/// Both ends of a forwarded connection.
#[derive(Debug)]
struct ForwardedConnection {
    ends: [TcpStream; 2],
    is_cut: Arc<AtomicBool>,
}

impl ForwardedConnection {
    fn cut(self, how: Cut) {
        self.is_cut.store(true, Ordering::SeqCst);
        for end in &self.ends {
            // An end that is already closed cannot be cut.
            let _ = match how {
                Cut::Close => end.shutdown(Shutdown::Both),
                // Closing the last descriptor of a socket with a linger time of zero sends a reset.
                // The forwarding threads see the end of their input and drop their descriptors.
                // They do not shut the other end down if the connection is cut.
                Cut::Reset => rustix::net::sockopt::set_socket_linger(end, Some(Duration::ZERO))
                    .map_err(Into::into)
                    .and_then(|()| end.shutdown(Shutdown::Read)),
            };
        }
    }
}

impl Link {
    /// Starts a proxy for the server that listens at `target`.
    pub(crate) fn start(target: String) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port for a proxy");
        let address = listener.local_addr().expect("a bound listener").to_string();
        let link_state = Mutex::default();
        let changed = Condvar::new();
        let state = Arc::new(ProxyState { target, link_state, changed });
        let shared = state.clone();
        // The thread ends with the process: a run has only one for each pair of tasks.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                shared.accept(client);
            }
        });
        Link { address, state }
    }

    /// Cuts all connections and returns their number. New ones are closed if `stays_down` is set.
    pub(crate) fn cut(&self, how: Cut, stays_down: bool) -> usize {
        let mut link_state = self.state.lock();
        link_state.down = stays_down;
        let connections = std::mem::take(&mut link_state.connections);
        drop(link_state);
        let count = connections.len();
        connections.into_iter().for_each(|connection| connection.cut(how));
        // Wakes the threads that wait for the end of a stall.
        self.state.changed.notify_all();
        count
    }

    /// Sets the stalled directions.
    pub(crate) fn stall(&self, stall: Stall) {
        self.state.lock().stall = stall;
        self.state.changed.notify_all();
    }

    /// Ends all faults: forwards in both directions and accepts connections.
    pub(crate) fn heal(&self) {
        self.state.lock().down = false;
        self.stall(Stall::default());
    }
}

impl ProxyState {
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.link_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, client: TcpStream) {
        // While the server is down, the client's connection is dropped.
        let Ok(server) = TcpStream::connect(&self.target) else { return };
        let ends = || -> std::io::Result<[TcpStream; 2]> {
            for end in [&client, &server] {
                end.set_nodelay(true)?;
                end.set_write_timeout(Some(WRITE_TIMEOUT))?;
            }
            Ok([client.try_clone()?, server.try_clone()?])
        };
        let (Ok(ends), Ok([to, from])) = (ends(), ends()) else { return };
        let is_cut = Arc::new(AtomicBool::new(false));
        let mut link_state = self.lock();
        if link_state.down {
            return;
        }
        link_state.connections.retain(|connection| connection.ends[0].peer_addr().is_ok());
        link_state.connections.push(ForwardedConnection { ends, is_cut: is_cut.clone() });
        drop(link_state);
        for (from, to, to_server) in [(client, server, true), (from, to, false)] {
            let shared = self.clone();
            let is_cut = is_cut.clone();
            std::thread::spawn(move || shared.forward(from, to, to_server, &is_cut));
        }
    }

    /// Forwards one direction until its end, then closes both ends.
    fn forward(
        &self,
        mut from: TcpStream,
        mut to: TcpStream,
        to_server: bool,
        is_cut: &AtomicBool,
    ) {
        let is_cut = || is_cut.load(Ordering::SeqCst);
        let mut buffer = vec![0; CHUNK];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut link_state = self.lock();
            while !is_cut() && link_state.stall.stops(to_server) {
                link_state = self.changed.wait(link_state).unwrap_or_else(PoisonError::into_inner);
            }
            drop(link_state);
            let mut left = &buffer[..count];
            while !left.is_empty() && !is_cut() {
                match to.write(left) {
                    Ok(written) => left = &left[written..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => break,
                }
            }
            if !left.is_empty() {
                break;
            }
        }
        // `ForwardedConnection::cut` has already closed a connection that is cut.
        if !is_cut() {
            [from, to].iter().for_each(|end| _ = end.shutdown(Shutdown::Both));
        }
    }
}

/// A link for each pair of tasks.
#[derive(Debug)]
pub(crate) struct Links {
    /// The links of each worker, by server.
    pub(crate) workers: Vec<Vec<Link>>,
    /// The links of each server, by server; its link to itself is unused.
    pub(crate) servers: Vec<Vec<Link>>,
}

impl Links {
    pub(crate) fn start(hosts: &[String], workers: usize) -> Links {
        let to_all = || hosts.iter().cloned().map(Link::start).collect();
        Links {
            workers: (0..workers).map(|_| to_all()).collect(),
            servers: hosts.iter().map(|_| to_all()).collect(),
        }
    }

    /// Returns the addresses at which a worker reaches the servers.
    pub(crate) fn of_worker(&self, worker: usize) -> Vec<String> {
        addresses(&self.workers[worker])
    }

    /// Returns the addresses at which a server reaches the others, and its own listening address.
    pub(crate) fn of_server(&self, task: usize, own: &str) -> Vec<String> {
        let mut addresses = addresses(&self.servers[task]);
        own.clone_into(&mut addresses[task]);
        addresses
    }

    /// Returns a link between two different tasks, by number modulo the number of links.
    pub(crate) fn pair(&self, number: u64) -> &Link {
        let workers = self.workers.iter().flatten();
        let others = self.servers.iter().enumerate().flat_map(|(from, links)| {
            links.iter().enumerate().filter(move |&(to, _)| to != from).map(|(_, link)| link)
        });
        let pairs: Vec<&Link> = workers.chain(others).collect();
        pairs[(number % pairs.len() as u64) as usize]
    }
}

fn addresses(links: &[Link]) -> Vec<String> {
    links.iter().map(|link| link.address.clone()).collect()
}
