//! A TCP proxy that cuts connections at points drawn from a seed.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::secured::handshake_bytes;

/// Forwards connections to a server and cuts each after a number of bytes drawn from a seed.
pub(crate) struct Proxy {
    pub(crate) address: String,
    shared: Arc<Shared>,
    accept_thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// Address of the server. New connections are closed while it is `None`.
    target: Mutex<Option<String>>,
    /// Mean number of bytes that one direction forwards before it is cut; 0 disables cuts.
    cut_after: AtomicU64,
    cuts: AtomicU64,
    ended: AtomicU64,
    random: AtomicU64,
    stopping: AtomicBool,
    /// Limit towards the server in bytes per second; 0 for no limit.
    rate: AtomicU64,
    /// Nothing is forwarded while this is set.
    is_paused: AtomicBool,
    /// Connections end at their next bytes, which are discarded.
    is_cut: AtomicBool,
}

impl Proxy {
    /// Starts a proxy for the server at `target`. Each direction of a connection forwards
    /// `cut_after` bytes on average before it is cut; 0 disables cuts.
    pub(crate) fn start(listener: TcpListener, target: String, cut_after: u64, seed: u64) -> Proxy {
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            target: Mutex::new(Some(target)),
            cut_after: AtomicU64::new(cut_after),
            cuts: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            random: AtomicU64::new(seed),
            stopping: AtomicBool::new(false),
            rate: AtomicU64::new(0),
            is_paused: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
        });
        let accept_thread = std::thread::spawn({
            let shared = shared.clone();
            move || {
                for stream in listener.incoming() {
                    if shared.stopping.load(Ordering::Relaxed) {
                        return;
                    }
                    let target = shared.target.lock().unwrap().clone();
                    let server = target.map(TcpStream::connect);
                    if let (Ok(client), Some(Ok(server))) = (stream, server) {
                        shared.forward(client, server);
                    }
                }
            }
        });
        Proxy { address, shared, accept_thread: Some(accept_thread) }
    }

    /// Number of connections cut so far.
    pub(crate) fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::Relaxed)
    }

    /// Whether any connection has ended, closed by either side or cut.
    pub(crate) fn has_ended_connection(&self) -> bool {
        self.shared.ended.load(Ordering::SeqCst) > 0
    }

    /// Limits forwarding towards the server to `rate` bytes per second.
    pub(crate) fn throttle(&self, rate: u64) {
        self.shared.rate.store(rate, Ordering::SeqCst);
    }

    /// Forwards new connections to another server, or closes them if `target` is `None`.
    pub(crate) fn redirect(&self, target: Option<String>) {
        *self.shared.target.lock().unwrap() = target;
    }

    /// Stops forwarding until [`Proxy::resume`].
    pub(crate) fn pause(&self) {
        self.shared.is_paused.store(true, Ordering::SeqCst);
    }

    /// Continues forwarding after [`Proxy::pause`].
    pub(crate) fn resume(&self) {
        self.shared.is_paused.store(false, Ordering::SeqCst);
    }

    /// Ends each connection at its next bytes, also if they wait for [`Proxy::resume`].
    pub(crate) fn cut_all(&self) {
        self.shared.is_cut.store(true, Ordering::SeqCst);
        self.resume();
    }

    /// Disables cuts for connections that are opened from now on.
    pub(crate) fn heal(&self) {
        self.shared.cut_after.store(0, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        // One last connection wakes the accept loop.
        let _ = TcpStream::connect(&self.address);
        if let Some(accept_thread) = self.accept_thread.take() {
            accept_thread.join().unwrap();
        }
    }
}

impl Shared {
    fn next_random(&self) -> u64 {
        let mut mixed = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn forward(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        for stream in [&client, &server] {
            stream.set_nodelay(true).unwrap();
        }
        let pairs = [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)];
        let mut upwards = true;
        for (from, to) in pairs {
            let shared = self.clone();
            let up = std::mem::take(&mut upwards);
            std::thread::spawn(move || shared.pump(from, to, up));
        }
    }

    /// Forwards one direction, then shuts down both streams.
    fn pump(&self, mut from: TcpStream, mut to: TcpStream, upwards: bool) {
        let mean = self.cut_after.load(Ordering::Relaxed);
        let cut = || handshake_bytes() + self.next_random() % (2 * mean);
        let mut left = if mean == 0 { u64::MAX } else { cut() };
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            while self.is_paused.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            if self.is_cut.load(Ordering::SeqCst) {
                break;
            }
            let rate = self.rate.load(Ordering::SeqCst);
            if upwards && rate > 0 {
                // The sleep is the slow network that this simulates.
                std::thread::sleep(Duration::from_micros(count as u64 * 1_000_000 / rate));
            }
            let forwarded = count.min(usize::try_from(left).unwrap_or(usize::MAX));
            if to.write_all(&buffer[..forwarded]).is_err() {
                break;
            }
            left -= forwarded as u64;
            if left == 0 {
                self.cuts.fetch_add(1, Ordering::Relaxed);
                break;
            }
        }
        self.ended.fetch_add(1, Ordering::SeqCst);
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}
