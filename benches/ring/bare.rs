//! The limit that the sockets of the machine set: processes in a ring exchange the bytes of an
//! all-reduce without frames, passes and folds.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::contender::Times;
use crate::sizes;

/// A connection, not blocking: its end for reads and its end for writes.
type Connection = (OwnedFd, OwnedFd);

fn connection(is_tcp: bool) -> io::Result<Connection> {
    if !is_tcp {
        let (reads, writes) = UnixStream::pair()?;
        reads.set_nonblocking(true)?;
        writes.set_nonblocking(true)?;
        return Ok((reads.into(), writes.into()));
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let writes = TcpStream::connect(listener.local_addr()?)?;
    let (reads, _) = listener.accept()?;
    for stream in [&reads, &writes] {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
    }
    Ok((reads.into(), writes.into()))
}

/// Starts the processes and returns their times: the slowest rank of a round counts.
pub(crate) fn time(ranks: u32, kib_max: usize, is_tcp: bool) -> Result<Vec<Times>, String> {
    let lines = run(ranks, kib_max, is_tcp).map_err(|error| error.to_string())?;
    let mut times = Vec::new();
    for (at, (kib, rounds)) in sizes(kib_max).enumerate() {
        let mut slowest = vec![0.0_f64; rounds];
        for text in &lines {
            let line = text.lines().nth(at).unwrap_or_default();
            let of_rank = line.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
            for (slowest, time) in slowest.iter_mut().zip(of_rank) {
                *slowest = slowest.max(time);
            }
        }
        slowest.sort_by(f64::total_cmp);
        times.push(Times { kib, median: slowest[rounds / 2], minimum: slowest[0] });
    }
    Ok(times)
}

/// Runs a process for each rank: its standard input comes from the rank before, its standard output
/// goes to the rank behind. Returns what each has written to its standard error.
fn run(ranks: u32, kib_max: usize, is_tcp: bool) -> io::Result<Vec<String>> {
    let program = std::env::current_exe()?;
    let connections = (0..ranks).map(|_| connection(is_tcp)).collect::<io::Result<Vec<_>>>()?;
    let (mut from, to): (Vec<OwnedFd>, Vec<OwnedFd>) = connections.into_iter().unzip();
    // Connection `r` leads from rank `r` to the next one.
    from.rotate_right(1);
    let start = |(reads, writes): (OwnedFd, OwnedFd)| {
        Command::new(&program)
            .args(["--bare", &ranks.to_string(), "--kib-max", &kib_max.to_string()])
            .stdin(Stdio::from(reads))
            .stdout(Stdio::from(writes))
            .stderr(Stdio::piped())
            .spawn()
    };
    let children = from.into_iter().zip(to).map(start).collect::<io::Result<Vec<_>>>()?;
    let output = |child: std::process::Child| {
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(text) } else { Err(io::Error::other(text)) }
    };
    children.into_iter().map(output).collect()
}

/// Exchanges bytes as one rank. Writes the times of the rounds of each size in a line.
///
/// # Errors
/// Those of the sockets.
pub(crate) fn rank(ranks: u32, kib_max: usize) -> io::Result<()> {
    let mut from = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut to = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let around = ranks as usize - 1;
    for (kib, rounds) in sizes(kib_max) {
        let bytes = (kib << 10) * 2 * around / ranks as usize;
        let output = vec![1_u8; bytes];
        let mut input = vec![0_u8; bytes];
        let mut line = String::new();
        for _ in 0..rounds {
            for _ in 0..around {
                exchange(&mut from, &mut to, &[1], &mut [0])?;
            }
            let begin = Instant::now();
            exchange(&mut from, &mut to, &output, &mut input)?;
            line += &format!("{} ", begin.elapsed().as_secs_f64() * 1e6);
        }
        eprintln!("{line}");
    }
    Ok(())
}

/// Sends and receives at the same time.
fn exchange(from: &mut File, to: &mut File, output: &[u8], input: &mut [u8]) -> io::Result<()> {
    let mut sent = 0;
    let mut received = 0;
    while sent < output.len() || received < input.len() {
        let mut has_moved = false;
        let mut moved = |moved: io::Result<usize>| match moved {
            Ok(0) => Err(io::Error::from(ErrorKind::UnexpectedEof)),
            Ok(bytes) => {
                has_moved = true;
                Ok(bytes)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error),
        };
        // In pieces that stay in cache, as a ring moves its parts.
        if sent < output.len() {
            sent += moved(to.write(&output[sent..output.len().min(sent + PIECE)]))?;
        }
        if received < input.len() {
            let end = input.len().min(received + PIECE);
            received += moved(from.read(&mut input[received..end]))?;
        }
        if !has_moved {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// The most bytes of one call of the system.
const PIECE: usize = 256 << 10;
