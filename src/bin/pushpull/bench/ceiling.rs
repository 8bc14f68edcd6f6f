//! What the machine can do: small loops over the bare transport, run beside ours.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushpull::Sgd;
use pushpull::measure::{InPlace, StoreUnderTest};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::bed::RATE;
use super::{Failure, Transport};

/// The short message of a round trip.
const SHORT: usize = 32;
/// How much is read at once, and applied while it is in cache.
const CHUNK: usize = 1 << 20;

/// Which way the payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To the server, which applies it in place as it arrives.
    Push,
    /// From the server.
    Pull,
}

/// A stream of either kind.
trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

/// One connection with one request outstanding, into a reused buffer.
pub(crate) struct RoundTrip {
    stream: Box<dyn Stream>,
    buffer: Vec<u8>,
    way: Way,
    server: Option<JoinHandle<()>>,
}

impl RoundTrip {
    pub(crate) fn start(
        transport: Transport,
        way: Way,
        bytes: usize,
    ) -> std::io::Result<RoundTrip> {
        let (client, server): (Box<dyn Stream>, Box<dyn Stream>) = match transport {
            Transport::Uds | Transport::Shm => {
                let (client, server) = UnixStream::pair()?;
                (Box::new(client), Box::new(server))
            }
            Transport::Tcp => {
                let (client, server) = tcp_pair()?;
                (Box::new(client), Box::new(server))
            }
        };
        let server = std::thread::spawn(move || serve(server, way, bytes));
        Ok(RoundTrip { stream: client, buffer: vec![0; bytes], way, server: Some(server) })
    }

    /// What it is called.
    pub(crate) fn name(transport: Transport, way: Way) -> &'static str {
        match (transport, way) {
            (Transport::Tcp, Way::Pull) => "rr_tcp",
            (Transport::Tcp, Way::Push) => "rr_apply_tcp",
            (_, Way::Pull) => "rr_uds",
            (_, Way::Push) => "rr_apply_uds",
        }
    }

    /// One round trip.
    pub(crate) fn once(&mut self) -> std::io::Result<Duration> {
        let start = Instant::now();
        let mut short = [0; SHORT];
        self.stream.write_all(&short)?;
        match self.way {
            Way::Push => {
                self.stream.write_all(&self.buffer)?;
                self.stream.read_exact(&mut short)?;
            }
            Way::Pull => {
                self.stream.read_exact(&mut short)?;
                self.stream.read_exact(&mut self.buffer)?;
            }
        }
        Ok(start.elapsed())
    }
}

impl Drop for RoundTrip {
    fn drop(&mut self) {
        // The server ends with the stream.
        self.stream = Box::new(std::io::Cursor::new(Vec::new()));
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn serve(mut stream: Box<dyn Stream>, way: Way, bytes: usize) {
    let mut short = [0; SHORT];
    let mut values = vec![0.0_f32; bytes / 4];
    let mut chunk = vec![0.0_f32; CHUNK.min(bytes) / 4];
    while stream.read_exact(&mut short).is_ok() {
        let done = match way {
            Way::Pull => stream
                .write_all(&short)
                .and_then(|()| stream.write_all(bytemuck::cast_slice(&values))),
            Way::Push => {
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

/// A word that two threads change in turn: what asking anybody at all costs within a machine.
pub(crate) struct SharedWord {
    word: Arc<AtomicU64>,
    other: Option<JoinHandle<()>>,
}

/// Waits a little; where the other thread may have no core, it is given this one. Whether it was.
fn wait(turns: &mut u32) -> bool {
    *turns = turns.wrapping_add(1);
    let gives = turns.is_multiple_of(1000);
    match gives {
        true => std::thread::yield_now(),
        false => std::hint::spin_loop(),
    }
    gives
}

/// The word once there will be no more questions.
const OVER: u64 = u64::MAX;

impl SharedWord {
    /// The other thread does something before it answers.
    pub(crate) fn start(mut answer: impl FnMut() + Send + 'static) -> SharedWord {
        let word = Arc::new(AtomicU64::new(0));
        let shared = word.clone();
        // It answers odd numbers with even ones.
        let other = std::thread::spawn(move || {
            let mut turns = 0;
            loop {
                match shared.load(Ordering::Acquire) {
                    OVER => return,
                    asked if asked % 2 == 1 => {
                        answer();
                        shared.store(asked + 1, Ordering::Release);
                        turns = 0;
                    }
                    _ => _ = wait(&mut turns),
                }
            }
        });
        SharedWord { word, other: Some(other) }
    }

    /// One question and its answer.
    pub(crate) fn once(&mut self) -> Result<Duration, Failure> {
        let start = Instant::now();
        let asked = self.word.load(Ordering::Relaxed) + 1;
        self.word.store(asked, Ordering::Release);
        let mut turns = 0;
        while self.word.load(Ordering::Acquire) == asked {
            if wait(&mut turns) && self.other.as_ref().is_none_or(JoinHandle::is_finished) {
                return Err("the thread that answers has panicked".into());
            }
        }
        Ok(start.elapsed())
    }
}

impl Drop for SharedWord {
    fn drop(&mut self) {
        self.word.store(OVER, Ordering::Release);
        if let Some(other) = self.other.take() {
            let _ = other.join();
        }
    }
}

/// A copy from one buffer to another.
pub(crate) struct Copying {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Copying {
    pub(crate) fn new(bytes: usize) -> Copying {
        // Not zeros as they come from the system, which would be one page over and over.
        Copying { from: vec![1; bytes], to: vec![2; bytes] }
    }

    /// One copy.
    pub(crate) fn once(&mut self) -> Duration {
        let start = Instant::now();
        self.to.copy_from_slice(std::hint::black_box(&self.from));
        std::hint::black_box(&mut self.to);
        start.elapsed()
    }
}

/// Plain gradient descent in place, with a gradient that is there: what a push has to do at the least.
pub(crate) struct Applying {
    values: InPlace,
    gradient: Vec<f32>,
}

impl Applying {
    pub(crate) fn new(bytes: usize) -> std::io::Result<Applying> {
        let (elements, rule) = (bytes / 4, Arc::new(Sgd::new(RATE)));
        let values = InPlace::new(elements, rule)?;
        Ok(Applying { values, gradient: vec![0.0; elements] })
    }

    /// One gradient, which is written before, as a worker's is.
    pub(crate) fn once(&mut self) -> Duration {
        self.gradient.fill(1.0);
        let start = Instant::now();
        self.values.push(std::hint::black_box(&self.gradient));
        std::hint::black_box(&mut self.values);
        start.elapsed()
    }
}

/// What one thread writes and another has the store apply, which is asked by a shared word: a push without
/// its messages.
pub(crate) struct Handing {
    word: SharedWord,
    /// Each of them has it while the other waits.
    gradient: Arc<Mutex<Vec<f32>>>,
}

impl Handing {
    pub(crate) fn start(bytes: usize) -> Result<Handing, Failure> {
        let elements = bytes / 4;
        let mut store = StoreUnderTest::new(elements as u64, Arc::new(Sgd::new(RATE)))?;
        let gradient = Arc::new(Mutex::new(vec![0.0; elements]));
        let handed = gradient.clone();
        let word = SharedWord::start(move || {
            if let Ok(gradient) = handed.lock() {
                store.push(&gradient);
            }
        });
        Ok(Handing { word, gradient })
    }

    /// One gradient, which is written before, as a worker's is.
    pub(crate) fn once(&mut self) -> Result<Duration, Failure> {
        let mut gradient = self.gradient.lock().map_err(|_| "the store has panicked")?;
        gradient.fill(1.0);
        drop(gradient);
        self.word.once()
    }
}

/// The two ends of a connection over loopback.
fn tcp_pair() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    Ok((client, server))
}

/// A stream of either kind that a runtime waits for.
trait Waited: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Waited for S {}

/// One end of a connection that no runtime waits for yet.
enum End {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl End {
    /// Has the runtime of this thread wait for it.
    fn waited(self) -> std::io::Result<Box<dyn Waited>> {
        Ok(match self {
            End::Tcp(stream) => {
                stream.set_nonblocking(true)?;
                Box::new(tokio::net::TcpStream::from_std(stream)?)
            }
            End::Unix(stream) => {
                stream.set_nonblocking(true)?;
                Box::new(tokio::net::UnixStream::from_std(stream)?)
            }
        })
    }
}

/// 64 bytes both ways between two runtimes of one thread each.
pub(crate) struct PingPong {
    runtime: tokio::runtime::Runtime,
    stream: Option<Box<dyn Waited>>,
    server: Option<JoinHandle<()>>,
}

impl PingPong {
    pub(crate) fn start(transport: Transport) -> std::io::Result<PingPong> {
        let (client, server) = match transport {
            Transport::Tcp => tcp_pair().map(|(a, b)| (End::Tcp(a), End::Tcp(b)))?,
            _ => UnixStream::pair().map(|(a, b)| (End::Unix(a), End::Unix(b)))?,
        };
        let server = std::thread::spawn(move || {
            // What fails here is told by the other end, which gets no answer.
            let _ = runtime().and_then(|runtime| runtime.block_on(answer(server)));
        });
        let runtime = runtime()?;
        let stream = runtime.block_on(async { client.waited() })?;
        Ok(PingPong { runtime, stream: Some(stream), server: Some(server) })
    }

    /// What it is called.
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

/// Sends back what comes, until nothing more does.
async fn answer(end: End) -> std::io::Result<()> {
    let (mut stream, mut message) = (end.waited()?, [0; 64]);
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
    fn who_panics_is_not_waited_for() {
        let mut asked = 0;
        let mut word = SharedWord::start(move || {
            asked += 1;
            assert!(asked < 3, "enough was asked");
        });
        assert!(word.once().is_ok());
        assert!(word.once().is_ok());
        assert!(word.once().is_err());
        assert!(word.once().is_err(), "nor asked again");
    }
}
