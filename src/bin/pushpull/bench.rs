//! Pulls and pushes against a server in this process, in turns with the ceiling.

use std::error::Error;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use pushpull::blocking::{Reader, Worker};
use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

use super::ceiling::{PingPong, RoundTrip, Way};
use super::report::{Row, Unit, say};

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Suite::Transport])]
    suite: Vec<Suite>,
    /// The size of the variable of the suite `apply`.
    #[arg(long, default_value = "256MiB")]
    apply_size: String,
    /// The sizes of the state of the suite `restart`.
    #[arg(long, value_delimiter = ',', default_values = ["64MiB", "1GiB", "4GiB"])]
    restart_sizes: Vec<String>,
    /// The size of the variable of the suite `checkpoint`.
    #[arg(long, default_value = "256MiB")]
    checkpoint_size: String,
    /// The transports.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Transport::Tcp])]
    transport: Vec<Transport>,
    /// The sizes, such as 64B, 4KiB or 4MiB.
    #[arg(long, value_delimiter = ',', default_values = ["64B", "64KiB", "1MiB", "4MiB", "64MiB"])]
    sizes: Vec<String>,
    /// Rounds in which ours and the ceiling take turns.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Prints one JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Pulls and pushes over sockets.
    Transport,
    /// The rules in the store, beside the rules in place.
    Apply,
    /// Rows of a sparse variable in the store, beside a bare gather.
    Rows,
    /// A killed daemon, from exec to its first answered pull, beside a process that does nothing.
    Restart,
    /// A small network trained by two workers, beside the same two computing alone.
    Mlp,
    /// A checkpoint while pushes go on, beside a file that is written, flushed and read.
    Checkpoint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    Tcp,
    Uds,
}

impl Transport {
    /// An address for a server of this process, and the private folder that it lies in.
    pub(crate) fn address(self, what: &str) -> std::io::Result<(String, Option<Directory>)> {
        Ok(match self {
            Transport::Tcp => ("127.0.0.1:0".to_owned(), None),
            Transport::Uds => {
                let folder = private_folder(what)?;
                (format!("unix:{}/ps.sock", folder.0.display()), Some(folder))
            }
        })
    }
}

pub(crate) type Failure = Box<dyn Error>;

/// The time that one side of a round takes, roughly.
const ROUND: Duration = Duration::from_millis(300);

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !options.json {
        say(&format!("{:<24} {:>9} {:>9} {:>7}", "name", "ours", "ceiling", "ratio"))?;
    }
    for suite in &options.suite {
        match suite {
            Suite::Transport => {
                for &transport in &options.transport {
                    for size in &options.sizes {
                        measure(options, transport, size)?;
                    }
                }
            }
            Suite::Restart => {
                for size in &options.restart_sizes {
                    super::restart::run(size, bytes_of(size)?, options.rounds, options.json)?;
                }
            }
            Suite::Checkpoint => {
                let bytes = bytes_of(&options.checkpoint_size)?;
                super::saving::run(&options.checkpoint_size, bytes, options.rounds, options.json)?;
            }
            Suite::Mlp => {
                for &transport in &options.transport {
                    super::mlp::run(transport, options.rounds, options.json)?;
                }
            }
            Suite::Rows => super::rows::run(options.rounds, options.json)?,
            Suite::Apply => {
                super::apply::run(bytes_of(&options.apply_size)?, options.rounds, options.json)?;
            }
        }
    }
    Ok(())
}

fn bytes_of(size: &str) -> Result<usize, Failure> {
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &size[digits.len()..] {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => {
            return Err(
                format!("cannot read the size {size:?}: say 64B, 4KiB, 4MiB or 1GiB").into()
            );
        }
    };
    let bytes = digits.parse::<usize>()?.saturating_mul(unit);
    if bytes == 0 || bytes % 8 != 0 || bytes > 1 << 33 {
        return Err(format!("cannot measure {size}: not a multiple of 8 up to 8GiB").into());
    }
    Ok(bytes)
}

fn measure(options: &Options, transport: Transport, size: &str) -> Result<(), Failure> {
    let bytes = bytes_of(size)?;
    let mut bed = TestBed::start(transport, bytes)?;
    let word = if transport == Transport::Uds { "uds" } else { "tcp" };
    let row = |verb: &str, unit, ours, ceiling| Row {
        name: match unit {
            Unit::Latency => format!("latency_{verb}_{word}_{size}"),
            _ => format!("{verb}_{word}_{size}"),
        },
        unit,
        amount: bytes as u64,
        ours,
        ceiling,
    };
    let unix = transport == Transport::Uds;
    // A ping-pong is the ceiling of small messages; the bare transport that of large ones.
    if bytes <= 64 && !unix {
        let mut ceiling = PingPong::start()?;
        let (ours, theirs) = take_turns(options.rounds, || bed.pull(), || Ok(ceiling.once()?))?;
        row("pull", Unit::Latency, ours, theirs).print(options.json)?;
    }
    for (verb, way) in [("pull", Way::Pull), ("push", Way::Push)] {
        let mut ceiling = RoundTrip::start(unix, way, bytes)?;
        let ours = || match way {
            Way::Pull => bed.pull(),
            Way::Push => bed.push(),
        };
        let (ours, theirs) = take_turns(options.rounds, ours, || Ok(ceiling.once()?))?;
        row(verb, Unit::Throughput, ours, theirs).print(options.json)?;
    }
    bed.check()
}

/// A private folder, removed with its contents. On a memory file system if there is one.
pub(crate) fn private_folder(what: &str) -> std::io::Result<Directory> {
    let shared = std::path::Path::new("/dev/shm");
    let root = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let path = root.join(format!("pushpull-bench-{what}-{}", std::process::id()));
    std::fs::create_dir_all(&path)?;
    Ok(Directory(path))
}

pub(crate) type Rounds = Vec<Vec<Duration>>;

/// Does something once, and says how long it took.
pub(crate) type Operation<'a> = &'a mut dyn FnMut() -> Result<Duration, Failure>;

/// Ours, ceiling, ours, ceiling: each for about [`ROUND`].
pub(crate) fn take_turns(
    rounds: usize,
    mut ours: impl FnMut() -> Result<Duration, Failure>,
    mut ceiling: impl FnMut() -> Result<Duration, Failure>,
) -> Result<(Rounds, Rounds), Failure> {
    let [ours, ceiling] = all_take_turns(rounds, [&mut ours, &mut ceiling])?;
    Ok((ours, ceiling))
}

/// One after the other, again and again: each for about [`ROUND`].
pub(crate) fn all_take_turns<const N: usize>(
    rounds: usize,
    mut operations: [Operation<'_>; N],
) -> Result<[Rounds; N], Failure> {
    // The first operations touch memory for the first time.
    for _ in 0..3 {
        for operation in &mut operations {
            operation()?;
        }
    }
    let mut all = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (rounds, operation) in all.iter_mut().zip(&mut operations) {
            rounds.push(one_round(operation)?);
        }
    }
    Ok(all)
}

fn one_round(operation: Operation<'_>) -> Result<Vec<Duration>, Failure> {
    let start = Instant::now();
    let mut durations = Vec::new();
    while start.elapsed() < ROUND || durations.len() < 3 {
        durations.push(operation()?);
    }
    Ok(durations)
}

/// A server and a worker in this process, over a real socket.
struct TestBed {
    _server: Ps,
    config: WorkerConfig,
    worker: Worker,
    reader: Reader,
    params: pushpull::Params,
    pushes: u64,
    _directory: Option<Directory>,
}

/// A private folder for a socket, removed with its contents.
pub(crate) struct Directory(pub(crate) std::path::PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const RATE: f64 = 0.5;

impl TestBed {
    fn start(transport: Transport, bytes: usize) -> Result<TestBed, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let (address, directory) = transport.address("transport")?;
        let listener = runtime.block_on(Ps::listen(&address))?;
        let cluster = ClusterSpec::builder()
            .job("ps", [listener.address()])
            .job("worker", ["127.0.0.1:1"])
            .build()?;
        let server =
            listener.start(PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(RATE)))?;
        let config = WorkerConfig::new(cluster, TaskId::worker(0));
        let mut worker = Worker::connect(config.clone())?;
        let variable = VariableSpec::f32("w", [bytes as u64 / 4])?;
        worker.join(&[variable], |_| ())?;
        let reader = Reader::connect(config.clone())?;
        let params = reader.params();
        Ok(TestBed {
            _server: server,
            config,
            worker,
            reader,
            params,
            pushes: 0,
            _directory: directory,
        })
    }

    fn pull(&mut self) -> Result<Duration, Failure> {
        let start = Instant::now();
        self.reader.pull(&mut self.params)?;
        Ok(start.elapsed())
    }

    /// One push, acknowledged as applied. What a model would do, filling the gradient, is not
    /// measured.
    fn push(&mut self) -> Result<Duration, Failure> {
        let token = self.worker.token()?.ok_or("the training has ended")?;
        let mut gradients = self.worker.gradients();
        gradients.view_mut::<f32>("w")?.fill(1.0);
        let start = Instant::now();
        self.worker.push(token, gradients)?;
        let elapsed = start.elapsed();
        self.pushes += 1;
        Ok(elapsed)
    }

    /// The values on the server must be what the pushes add up to.
    fn check(self) -> Result<(), Failure> {
        let mut reader = Reader::connect(self.config.clone())?;
        let mut params = reader.params();
        let step = reader.pull(&mut params)?;
        // Halves add up exactly in f32 as long as there are fewer than 2^24 of them.
        let expected = -(RATE * self.pushes as f64) as f32;
        let wrong = params.view::<f32>("w")?.iter().position(|&value| value != expected);
        match wrong {
            None if step == self.pushes => Ok(()),
            None => Err(format!("the step is {step} after {} pushes", self.pushes).into()),
            Some(index) => Err(format!("element {index} is not {expected}").into()),
        }
    }
}
