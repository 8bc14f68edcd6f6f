//! The ceilings of the machine: small loops over the bare transport and bare memory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushpull::Sgd;
use pushpull_ps::measure::{InPlace, StoreUnderTest};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::bed::RATE;
use super::tls::tls_pair;
use super::{BenchError, Transport};

/// Size in bytes of the short message of a round trip.
const SHORT: usize = 32;
/// Bytes that the server reads at once and applies while they are in cache.
const CHUNK: usize = 1 << 20;

/// Direction of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadDirection {
    /// To the server, which applies it in place as it arrives.
    Push,
    /// From the server.
    Pull,
}

/// A blocking stream, TCP or Unix.
pub(crate) trait DuplexStream: Read + Write + Send {}
impl<S: Read + Write + Send> DuplexStream for S {}

/// One connection with one outstanding request and a reused buffer.
pub(crate) struct RoundTrip {
    stream: Box<dyn DuplexStream>,
    buffer: Vec<u8>,
    direction: PayloadDirection,
    server: Option<JoinHandle<()>>,
}

impl RoundTrip {
    pub(crate) fn start(
        transport: Transport,
        direction: PayloadDirection,
        bytes: usize,
    ) -> std::io::Result<RoundTrip> {
        let (client, server): (Box<dyn DuplexStream>, Box<dyn DuplexStream>) = match transport {
            Transport::Uds | Transport::Shm => {
                let (client, server) = UnixStream::pair()?;
                (Box::new(client), Box::new(server))
            }
            Transport::Tcp => {
                let (client, server) = tcp_pair()?;
                (Box::new(client), Box::new(server))
            }
            Transport::Tls => {
                let (client, server) = tcp_pair()?;
                tls_pair(client, server)?
            }
        };
        let server = std::thread::spawn(move || serve(server, direction, bytes));
        Ok(RoundTrip { stream: client, buffer: vec![0; bytes], direction, server: Some(server) })
    }

    /// Returns its name for the column `ceiling is`.
    pub(crate) fn name(transport: Transport, direction: PayloadDirection) -> &'static str {
        match (transport, direction) {
            (Transport::Tcp, PayloadDirection::Pull) => "rr_tcp",
            (Transport::Tcp, PayloadDirection::Push) => "rr_apply_tcp",
            (Transport::Tls, PayloadDirection::Pull) => "rr_rustls",
            (Transport::Tls, PayloadDirection::Push) => "rr_apply_rustls",
            (_, PayloadDirection::Pull) => "rr_uds",
            (_, PayloadDirection::Push) => "rr_apply_uds",
        }
    }

    /// Measures one round trip.
    pub(crate) fn once(&mut self) -> std::io::Result<Duration> {
        let start = Instant::now();
        let mut short = [0; SHORT];
        self.stream.write_all(&short)?;
        match self.direction {
            PayloadDirection::Push => {
                self.stream.write_all(&self.buffer)?;
                self.stream.read_exact(&mut short)?;
            }
            PayloadDirection::Pull => {
                self.stream.read_exact(&mut short)?;
                self.stream.read_exact(&mut self.buffer)?;
            }
        }
        Ok(start.elapsed())
    }
}

impl Drop for RoundTrip {
    fn drop(&mut self) {
        // Closing the stream ends the server thread.
        self.stream = Box::new(std::io::Cursor::new(Vec::new()));
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn serve(mut stream: Box<dyn DuplexStream>, direction: PayloadDirection, bytes: usize) {
    let mut short = [0; SHORT];
    let mut values = vec![0.0_f32; bytes / 4];
    let mut chunk = vec![0.0_f32; CHUNK.min(bytes) / 4];
    while stream.read_exact(&mut short).is_ok() {
        let done = match direction {
            PayloadDirection::Pull => stream
                .write_all(&short)
                .and_then(|()| stream.write_all(bytemuck::cast_slice(&values))),
            PayloadDirection::Push => {
                let mut received = Ok(());
                for values in values.chunks_mut(CHUNK / 4) {
                    let gradient = &mut chunk[..values.len()];
                    received = stream.read_exact(bytemuck::cast_slice_mut(gradient));
                    for (value, gradient) in values.iter_mut().zip(&*gradient) {
                        *value -= 0.5 * gradient;
                    }
                }
                received.and_then(|()| stream.write_all(&short))
            }
        };
        if done.is_err() {
            return;
        }
    }
}

/// A word that two threads change alternately: the least cost of a request between two threads.
pub(crate) struct SharedWord {
    word: Arc<AtomicU64>,
    other: Option<JoinHandle<()>>,
}

/// Spins once; every 1000th call yields the core instead, in case the other thread has none.
/// Returns whether it yielded.
fn spin(turns: &mut u32) -> bool {
    *turns = turns.wrapping_add(1);
    let yields = turns.is_multiple_of(1000);
    match yields {
        true => std::thread::yield_now(),
        false => std::hint::spin_loop(),
    }
    yields
}

/// The value that ends the answering thread.
const STOP: u64 = u64::MAX;

impl SharedWord {
    /// Starts the answering thread, which calls `answer` before each answer.
    pub(crate) fn start(mut answer: impl FnMut() + Send + 'static) -> SharedWord {
        let word = Arc::new(AtomicU64::new(0));
        let shared = word.clone();
        // Odd numbers are requests, even ones answers.
        let other = std::thread::spawn(move || {
            let mut turns = 0;
            loop {
                match shared.load(Ordering::Acquire) {
                    STOP => return,
                    asked if asked % 2 == 1 => {
                        answer();
                        shared.store(asked + 1, Ordering::Release);
                        turns = 0;
                    }
                    _ => _ = spin(&mut turns),
                }
            }
        });
        SharedWord { word, other: Some(other) }
    }

    /// Measures one request and its answer.
    pub(crate) fn once(&mut self) -> Result<Duration, BenchError> {
        let start = Instant::now();
        let asked = self.word.load(Ordering::Relaxed) + 1;
        self.word.store(asked, Ordering::Release);
        let mut turns = 0;
        while self.word.load(Ordering::Acquire) == asked {
            if spin(&mut turns) && self.other.as_ref().is_none_or(JoinHandle::is_finished) {
                return Err("the answering thread panicked".into());
            }
        }
        Ok(start.elapsed())
    }
}

impl Drop for SharedWord {
    fn drop(&mut self) {
        self.word.store(STOP, Ordering::Release);
        if let Some(other) = self.other.take() {
            let _ = other.join();
        }
    }
}

/// A copy from one buffer to another, `memcpy`.
pub(crate) struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Memcpy {
    pub(crate) fn new(bytes: usize) -> Memcpy {
        // Zeroed memory from the kernel may be one page mapped many times.
        Memcpy { from: vec![1; bytes], to: vec![2; bytes] }
    }

    /// Measures one copy.
    pub(crate) fn once(&mut self) -> Duration {
        let start = Instant::now();
        self.to.copy_from_slice(std::hint::black_box(&self.from));
        std::hint::black_box(&mut self.to);
        start.elapsed()
    }
}

/// Plain gradient descent in place with a gradient in memory: the least work of a push.
pub(crate) struct RuleInPlace {
    values: InPlace,
    gradient: Vec<f32>,
}

impl RuleInPlace {
    pub(crate) fn new(bytes: usize) -> std::io::Result<RuleInPlace> {
        let elements = bytes / 4;
        let rule = Arc::new(Sgd::new(RATE));
        let values = InPlace::new(elements, rule)?;
        Ok(RuleInPlace { values, gradient: vec![0.0; elements] })
    }

    /// Measures one gradient. Writing the gradient, the work of a worker, is not measured.
    pub(crate) fn once(&mut self) -> Duration {
        self.gradient.fill(1.0);
        let start = Instant::now();
        self.values.push(std::hint::black_box(&self.gradient));
        std::hint::black_box(&mut self.values);
        start.elapsed()
    }
}

/// A gradient that one thread writes and another applies to a store, signalled by a shared word: a
/// push without its messages.
pub(crate) struct GradientHandoff {
    word: SharedWord,
    /// Each thread locks it while the other waits for the word.
    gradient: Arc<Mutex<Vec<f32>>>,
}

impl GradientHandoff {
    pub(crate) fn start(bytes: usize) -> Result<GradientHandoff, BenchError> {
        let elements = bytes / 4;
        let mut store = StoreUnderTest::new(elements as u64, Arc::new(Sgd::new(RATE)))?;
        let gradient = Arc::new(Mutex::new(vec![0.0; elements]));
        let shared = gradient.clone();
        let word = SharedWord::start(move || {
            if let Ok(gradient) = shared.lock() {
                store.push(&gradient);
            }
        });
        Ok(GradientHandoff { word, gradient })
    }

    /// Measures the hand-over of one gradient. Writing it, the work of a worker, is not measured.
    pub(crate) fn once(&mut self) -> Result<Duration, BenchError> {
        let mut gradient = self.gradient.lock().map_err(|_| "the storing thread panicked")?;
        gradient.fill(1.0);
        drop(gradient);
        self.word.once()
    }
}

/// Returns the two ends of a loopback connection.
pub(crate) fn tcp_pair() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    Ok((client, server))
}

/// An asynchronous stream, TCP or Unix.
trait AsyncStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> AsyncStream for S {}

/// One end of a connection that is not registered with a runtime yet.
enum StreamEnd {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl StreamEnd {
    /// Registers the stream with the runtime of this thread.
    fn register(self) -> std::io::Result<Box<dyn AsyncStream>> {
        Ok(match self {
            StreamEnd::Tcp(stream) => {
                stream.set_nonblocking(true)?;
                Box::new(tokio::net::TcpStream::from_std(stream)?)
            }
            StreamEnd::Unix(stream) => {
                stream.set_nonblocking(true)?;
                Box::new(tokio::net::UnixStream::from_std(stream)?)
            }
        })
    }
}

/// A ping-pong of 64 bytes between two single-threaded runtimes.
pub(crate) struct PingPong {
    runtime: tokio::runtime::Runtime,
    stream: Option<Box<dyn AsyncStream>>,
    server: Option<JoinHandle<()>>,
}

impl PingPong {
    pub(crate) fn start(transport: Transport) -> std::io::Result<PingPong> {
        let (client, server) = match transport {
            Transport::Tcp => tcp_pair().map(|(a, b)| (StreamEnd::Tcp(a), StreamEnd::Tcp(b)))?,
            _ => UnixStream::pair().map(|(a, b)| (StreamEnd::Unix(a), StreamEnd::Unix(b)))?,
        };
        let server = std::thread::spawn(move || {
            // A failure here reaches the other end, which gets no answer.
            let _ = runtime().and_then(|runtime| runtime.block_on(answer(server)));
        });
        let runtime = runtime()?;
        let stream = runtime.block_on(async { client.register() })?;
        Ok(PingPong { runtime, stream: Some(stream), server: Some(server) })
    }

    /// Returns its name for the column `ceiling is`.
    pub(crate) fn name(transport: Transport) -> &'static str {
        match transport {
            Transport::Tcp => "pingpong_tokio",
            _ => "pingpong_tokio_uds",
        }
    }

    pub(crate) fn once(&mut self) -> std::io::Result<Duration> {
        let Some(stream) = &mut self.stream else {
            return Ok(Duration::ZERO);
        };
        self.runtime.block_on(async {
            let start = Instant::now();
            let mut message = [0; 64];
            stream.write_all(&message).await?;
            stream.read_exact(&mut message).await?;
            Ok(start.elapsed())
        })
    }
}

/// Echoes messages until the stream ends.
async fn answer(end: StreamEnd) -> std::io::Result<()> {
    let mut stream = end.register()?;
    let mut message = [0; 64];
    loop {
        stream.read_exact(&mut message).await?;
        stream.write_all(&message).await?;
    }
}

impl Drop for PingPong {
    fn drop(&mut self) {
        self.stream = None;
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_answering_thread_ends_the_wait() {
        let mut asked = 0;
        let mut word = SharedWord::start(move || {
            asked += 1;
            assert!(asked < 3, "the planned panic");
        });
        assert!(word.once().is_ok());
        assert!(word.once().is_ok());
        assert!(word.once().is_err());
        assert!(word.once().is_err(), "a later request fails, too");
    }
}
