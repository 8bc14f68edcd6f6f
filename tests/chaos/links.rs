//! Links between tasks: a TCP proxy for each pair of them, in this process, which can be cut and stalled.
//!
//! A task is told the addresses of its own proxies, so that what is done to a link is done to that pair
//! alone. Addresses are no part of a cluster's identity, so that each task may have a view of its own.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes that are forwarded at once.
const CHUNK: usize = 64 << 10;

/// How long a write may block before it is looked whether its connection is cut.
const LOOK: Duration = Duration::from_millis(50);

/// How a link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends read an end of the stream, behind what was forwarded.
    Close,
    /// Both ends are told that the connection is reset, and what is under way is lost.
    Reset,
}

/// Which direction of a link is stalled: nothing is forwarded in it, and nothing is closed.
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
    /// Where the task finds the server.
    pub(crate) address: String,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    target: String,
    inside: Mutex<Inside>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inside {
    /// While it is down, connections are closed as they come.
    down: bool,
    stall: Stall,
    connections: Vec<Connection>,
}

/// Both ends of a connection.
#[derive(Debug)]
struct Connection {
    ends: [TcpStream; 2],
    is_cut: Arc<AtomicBool>,
}

impl Connection {
    fn cut(self, how: Cut) {
        self.is_cut.store(true, Ordering::SeqCst);
        for end in &self.ends {
            // An end that is closed already has nothing to be cut.
            let _ = match how {
                Cut::Close => end.shutdown(Shutdown::Both),
                // A reset is sent by the last descriptor that is closed, if it does not linger: those
                // that forward notice the end of what they read, and no end of the stream is sent.
                Cut::Reset => rustix::net::sockopt::set_socket_linger(end, Some(Duration::ZERO))
                    .map_err(Into::into)
                    .and_then(|()| end.shutdown(Shutdown::Read)),
            };
        }
    }
}

impl Link {
    /// A link to the server that listens at `target`.
    pub(crate) fn start(target: String) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port for a proxy");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (inside, changed) = (Mutex::default(), Condvar::new());
        let state = Arc::new(State { target, inside, changed });
        let shared = state.clone();
        // It ends with the process: a run has as many as it has pairs of tasks.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                shared.accept(client);
            }
        });
        Link { address, state }
    }

    /// Ends all connections. Unless `stays_down`, new ones are forwarded at once. Returns how many were cut.
    pub(crate) fn cut(&self, how: Cut, stays_down: bool) -> usize {
        let mut inside = self.state.lock();
        inside.down = stays_down;
        let connections = std::mem::take(&mut inside.connections);
        drop(inside);
        let count = connections.len();
        connections.into_iter().for_each(|connection| connection.cut(how));
        // Those that wait at a stall find theirs cut.
        self.state.changed.notify_all();
        count
    }

    /// Stops forwarding, or goes on with it.
    pub(crate) fn stall(&self, stall: Stall) {
        self.state.lock().stall = stall;
        self.state.changed.notify_all();
    }

    /// Forwards everything again, and new connections.
    pub(crate) fn heal(&self) {
        self.state.lock().down = false;
        self.stall(Stall::default());
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, client: TcpStream) {
        // A server that is dead is met as it would be without a proxy: nobody answers.
        let Ok(server) = TcpStream::connect(&self.target) else { return };
        let ends = || -> std::io::Result<[TcpStream; 2]> {
            for end in [&client, &server] {
                end.set_nodelay(true)?;
                end.set_write_timeout(Some(LOOK))?;
            }
            Ok([client.try_clone()?, server.try_clone()?])
        };
        let (Ok(ends), Ok([to, from])) = (ends(), ends()) else { return };
        let is_cut = Arc::new(AtomicBool::new(false));
        let mut inside = self.lock();
        if inside.down {
            return;
        }
        inside.connections.retain(|connection| connection.ends[0].peer_addr().is_ok());
        inside.connections.push(Connection { ends, is_cut: is_cut.clone() });
        drop(inside);
        for (from, to, to_server) in [(client, server, true), (from, to, false)] {
            let (shared, is_cut) = (self.clone(), is_cut.clone());
            std::thread::spawn(move || shared.forward(from, to, to_server, &is_cut));
        }
    }

    /// Forwards one direction; at its end both ends are closed.
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
            let mut inside = self.lock();
            while !is_cut() && inside.stall.stops(to_server) {
                inside = self.changed.wait(inside).unwrap_or_else(PoisonError::into_inner);
            }
            drop(inside);
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
        // One that is cut is closed as it was to be cut.
        if !is_cut() {
            [from, to].iter().for_each(|end| _ = end.shutdown(Shutdown::Both));
        }
    }
}

/// A link for each pair of tasks.
#[derive(Debug)]
pub(crate) struct Links {
    /// By worker, and by server.
    pub(crate) workers: Vec<Vec<Link>>,
    /// By server, and by the other server; the one to itself is unused.
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

    /// The addresses at which a worker finds the servers.
    pub(crate) fn of_worker(&self, worker: usize) -> Vec<String> {
        addresses(&self.workers[worker])
    }

    /// The addresses at which a server finds the others; at its own it listens.
    pub(crate) fn of_server(&self, task: usize, own: &str) -> Vec<String> {
        let mut addresses = addresses(&self.servers[task]);
        own.clone_into(&mut addresses[task]);
        addresses
    }

    /// The link of this number, over all pairs of different tasks.
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
