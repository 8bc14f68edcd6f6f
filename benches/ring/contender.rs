//! [`Contender`]: a program that times all-reduce in processes of its own.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use crate::{Options, bare, sizes};

/// A program that times all-reduce.
pub(crate) struct Contender {
    /// The name in the table.
    pub(crate) name: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Ring { transport: &'static str },
    OpenMpi { btl: &'static str },
    Gloo,
    Bare { is_tcp: bool },
}

/// The times of one turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The size.
    pub(crate) kib: usize,
    /// The median, in microseconds.
    pub(crate) median: f64,
    /// The minimum, in microseconds.
    pub(crate) minimum: f64,
}

impl Contender {
    /// Returns the contenders that the options ask for.
    pub(crate) fn all(options: &Options) -> Vec<Contender> {
        let contender = |name, kind| Contender { name, kind };
        let mut all = vec![
            contender("ring shm", Kind::Ring { transport: "shm" }),
            contender("ring unix", Kind::Ring { transport: "unix" }),
            contender("ring tcp", Kind::Ring { transport: "tcp" }),
        ];
        if options.peers {
            all.extend([
                contender("Open MPI shm", Kind::OpenMpi { btl: "vader,self" }),
                contender("Open MPI tcp", Kind::OpenMpi { btl: "tcp,self" }),
                contender("gloo tcp", Kind::Gloo),
                contender("bare unix", Kind::Bare { is_tcp: false }),
                contender("bare tcp", Kind::Bare { is_tcp: true }),
            ]);
        }
        all.retain(|contender| contender.name.contains(&options.only));
        all
    }

    /// Runs the program once. Returns the cause if it cannot run.
    pub(crate) fn time(&self, options: &Options, ranks: u32) -> Result<Vec<Times>, String> {
        let started = match self.kind {
            Kind::Ring { transport } => ring(options, ranks, transport),
            Kind::OpenMpi { btl } => open_mpi(options, ranks, btl),
            Kind::Gloo => gloo(options, ranks),
            Kind::Bare { is_tcp } => return bare::time(ranks, options.kib_max, is_tcp),
        };
        let children = started.map_err(|error| format!("cannot start it: {error}"))?;
        let mut lines = String::new();
        for child in children {
            let output = child.wait_with_output().map_err(|error| error.to_string())?;
            if !output.status.success() {
                let faults = String::from_utf8_lossy(&output.stderr).into_owned();
                let last = faults.lines().rfind(|line| !line.is_empty()).unwrap_or_default();
                return Err(format!("{}, {last}", output.status));
            }
            lines += &String::from_utf8_lossy(&output.stdout);
        }
        Ok(lines.lines().filter_map(parse).collect())
    }
}

/// Reads a line: size, median, minimum.
fn parse(line: &str) -> Option<Times> {
    let mut words = line.split_whitespace();
    let kib = words.next()?.parse().ok()?;
    let median = words.next()?.parse().ok()?;
    let minimum = words.next()?.parse().ok()?;
    Some(Times { kib, median, minimum })
}

fn spawn(command: &mut Command) -> std::io::Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
}

/// Returns sizes and rounds as the scripts read them.
fn workload(options: &Options) -> String {
    let pairs = sizes(options.kib_max).map(|(kib, rounds)| format!("{kib}:{rounds}"));
    pairs.collect::<Vec<String>>().join(",")
}

fn ring(options: &Options, ranks: u32, transport: &str) -> std::io::Result<Vec<Child>> {
    let program = std::env::current_exe()?;
    let kib_max = options.kib_max.to_string();
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        command
            .args(["--transport", transport, "--kib-max", &kib_max])
            .env("PUSHPULL_RANK", rank.to_string())
            .env("PUSHPULL_SIZE", ranks.to_string());
        spawn(&mut command)
    };
    (0..ranks).map(start).collect()
}

fn open_mpi(options: &Options, ranks: u32, btl: &str) -> std::io::Result<Vec<Child>> {
    let mut command = Command::new(&options.mpirun);
    command
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np"])
        .arg(ranks.to_string())
        .args(["--mca", "pml", "ob1", "--mca", "btl", btl])
        .args([&options.python, "-c", include_str!("open_mpi.py")])
        .arg(workload(options));
    Ok(vec![spawn(&mut command)?])
}

fn gloo(options: &Options, ranks: u32) -> std::io::Result<Vec<Child>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: u32| {
        let mut command = Command::new(&options.python);
        command
            .args(["-c", include_str!("gloo.py")])
            .arg(workload(options))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("GLOO_SOCKET_IFNAME", "lo");
        spawn(&mut command)
    };
    (0..ranks).map(start).collect()
}
