//! Workers whose samples are streams: the same accuracy as with the samples of a file, and a stream that
//! is cut is refused.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../../../tests/support/test_process.rs"]
mod test_process;

use std::io::{ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use test_process::{TestProcess, free_addresses};

/// Deadline that only ends a hang.
const LONG: Duration = Duration::from_secs(60);

/// Returns the records of the samples to train on.
fn records() -> Vec<Vec<u8>> {
    let output =
        Command::new(env!("CARGO_BIN_EXE_digits")).arg("--print-samples").output().unwrap();
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout).unwrap();
    let record = |line: &str| {
        let (label, pixels) = line.split_once(',').unwrap();
        let pixels =
            pixels.split(',').flat_map(|pixel| pixel.parse::<f32>().unwrap().to_le_bytes());
        label.parse::<u32>().unwrap().to_le_bytes().into_iter().chain(pixels).collect()
    };
    table.lines().map(record).collect()
}

/// Returns the stream of records.
fn stream<'a>(records: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let mut stream = Vec::new();
    let mut count = 0_u64;
    for record in records {
        stream.extend((record.len() as u32).to_le_bytes());
        stream.extend(record);
        count += 1;
    }
    stream.extend(u32::MAX.to_le_bytes());
    stream.extend(count.to_le_bytes());
    stream
}

/// Starts the trainer, and feeds its standard input.
fn fed(name: &str, arguments: &[&str], stream: Vec<u8>) -> (TestProcess, JoinHandle<()>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let feeder = std::thread::spawn(move || {
        // A process that refuses the stream reads no further.
        let _ = input.write_all(&stream);
    });
    (TestProcess { name: name.to_owned(), child }, feeder)
}

/// Returns the result of a process that ends well.
fn result(process: &mut TestProcess) -> Value {
    let (status, output, errors) = process.finish();
    assert!(status.success(), "{} ended with {status}: {errors}", process.name);
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

#[test]
fn a_stream_of_all_samples_trains_to_the_bit_as_the_samples_themselves() {
    let flags = ["--steps", "500", "--synchronous", "1/1"];
    let records = records();
    assert_eq!(records.len(), 1437);
    let (mut process, feeder) = fed("fed", &[&flags[..], &["--data=-"]].concat(), stream(&records));
    let of_stream = result(&mut process);
    feeder.join().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
    command.args(flags).stdout(Stdio::piped()).stderr(Stdio::piped());
    let alone = result(&mut TestProcess::start("alone", &mut command));
    assert_eq!(of_stream["accuracy"], alone["accuracy"], "{of_stream} {alone}");
    assert!(alone["accuracy"].as_f64().unwrap() > 0.9, "{alone}");
}

/// The first worker reads a pipe, the second one a socket.
#[test]
fn workers_with_shares_of_their_own_learn_what_none_could_alone() {
    let records = records();
    let hosts = free_addresses(3);
    let ps_hosts = format!("--ps_hosts={}", hosts[0]);
    let worker_hosts = format!("--worker_hosts={},{}", hosts[1], hosts[2]);
    let task = ["--steps=2000", &ps_hosts, &worker_hosts];
    let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
    command.args(task).args(["--job_name=ps", "--exit-grace=5"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = TestProcess::start("ps 0", &mut command);

    // The worker of the even labels has never seen an odd one.
    let share = |odd: u8| stream(records.iter().filter(|record| record[0] % 2 == odd));
    let first = [&task[..], &["--job_name=worker", "--task_index=0", "--data=-"]].concat();
    let (mut first, feeder) = fed("worker 0", &first, share(0));
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("share");
    let listener = UnixListener::bind(&socket).unwrap();
    let address = format!("--data=unix:{}", socket.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
    command.args(task).args(["--job_name=worker", "--task_index=1", &address]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut second = TestProcess::start("worker 1", &mut command);
    accept(&listener).write_all(&share(1)).unwrap();

    let chief = result(&mut first);
    second.succeed();
    server.succeed();
    feeder.join().unwrap();
    println!("{chief}");
    assert_eq!((&chief["steps"], &chief["workers"]), (&2000.into(), &2.into()), "{chief}");
    assert!(chief["accuracy"].as_f64().unwrap() >= 0.9, "{chief}");
}

/// Accepts a connection. A process that fails before it connects ends the wait.
fn accept(listener: &UnixListener) -> UnixStream {
    let begun = Instant::now();
    listener.set_nonblocking(true).unwrap();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                return stream;
            }
            Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
            Err(error) => assert!(begun.elapsed() < LONG, "nobody connects: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_stream_that_is_cut_or_of_other_samples_is_refused() {
    let records = records();
    let whole = stream(&records[..64]);
    let cut = whole[..whole.len() - 1].to_vec();
    let at = cut.len();
    let other = stream(&[b"label,x\n".to_vec()]);
    let cases = [
        (
            cut,
            format!("the stream \"-\": it ends at byte {at} without its end mark, behind 64 whole"),
        ),
        (b"label,x,y\n0,1,2\n".to_vec(), "the stream \"-\": it is ".to_owned()),
        (other, "the record has 8 bytes, expected 260: a label and pixels".to_owned()),
    ];
    for (bytes, expected) in cases {
        let flags = ["--data=-", "--steps=10", "--batch=1"];
        let (mut process, feeder) = fed("digits", &flags, bytes);
        let (status, _, errors) = process.finish();
        feeder.join().unwrap();
        assert!(!status.success() && errors.contains(&expected), "{status}: {errors}");
    }
}

#[test]
fn flags_that_count_samples_of_all_workers_are_refused_with_a_share() {
    for (flag, expected) in [("--epochs=2", "--epochs: "), ("--ledger", "--ledger: ")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
        command.args(["--ps_hosts=127.0.0.1:7", "--worker_hosts=127.0.0.1:8", "--job_name=worker"]);
        let output = command.args(["--data=-", flag]).stdin(Stdio::null()).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && errors.contains(expected), "{errors}");
    }
}
