//! Processes that meet at the rendezvous of their cluster: the tool as `pushpull rendezvous`, and
//! tasks that know nothing but its address.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::test_process::{LONG, TestProcess, free_addresses};

/// A `pushpull rendezvous`, with its address.
struct Rendezvous {
    process: TestProcess,
    output: BufReader<ChildStdout>,
    address: String,
}

impl Rendezvous {
    fn start(num_ps: u32, num_workers: u32) -> Rendezvous {
        Rendezvous::start_with(num_ps, num_workers, &[])
    }

    fn start_with(num_ps: u32, num_workers: u32, flags: &[&str]) -> Rendezvous {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull"));
        command.args(["rendezvous", "--listen", "127.0.0.1:0"]).args(flags);
        command.args([format!("--num-ps={num_ps}"), format!("--num-workers={num_workers}")]);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = TestProcess::start("rendezvous", command);
        let mut output = BufReader::new(process.child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let address = line.strip_prefix("rendezvous  ").unwrap().trim().to_owned();
        Rendezvous { process, output, address }
    }

    /// Returns the lines behind the first, and the errors, once the process has ended well.
    fn finish(mut self) -> (String, String) {
        let (status, _, errors) = self.process.finish();
        assert!(status.success(), "{errors}");
        let mut output = String::new();
        self.output.read_to_string(&mut output).unwrap();
        (output, errors)
    }
}

/// Returns a command of the tool or the daemon for a task of a cluster with 2 workers.
fn task(program: &str, address: &str, num_ps: u32, flags: &[&str]) -> Command {
    let mut command = Command::new(program);
    if program == TOOL {
        command.args(["resolve", "--json"]);
    }
    command.args(["--resolve", "flags", "--rendezvous", address]);
    command.args([format!("--num-ps={num_ps}"), "--num-workers=2".to_owned()]).args(flags);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const TOOL: &str = env!("CARGO_BIN_EXE_pushpull");
const DAEMON: &str = env!("CARGO_BIN_EXE_pushpull-ps");

/// The last line of an output as JSON.
fn last(output: &str) -> Value {
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

/// Ranks of two hosts, as a launcher says. Rank 0 serves the rendezvous, and starts last.
#[test]
fn six_processes_that_know_an_address_learn_one_cluster() {
    let [address] = <[String; 1]>::try_from(free_addresses(1)).unwrap();
    let rank = |rank: u32| {
        let mut command = Command::new(TOOL);
        command.args(["resolve", "--json", "--resolve", "mpi", "--num-ps", "2"]);
        command.args(["--base-port", "7000"]).env("PUSHPULL_RENDEZVOUS", &address);
        for (name, value) in
            [("RANK", rank), ("SIZE", 6), ("LOCAL_RANK", rank % 3), ("LOCAL_SIZE", 3)]
        {
            command.env(format!("OMPI_COMM_WORLD_{name}"), value.to_string());
        }
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        TestProcess::start(format!("rank {rank}"), command)
    };
    let ranks: Vec<_> = (0..6).rev().map(rank).collect();
    for (number, mut rank) in (0..6).rev().zip(ranks) {
        let found = last(&rank.succeed());
        let expected =
            json!({"ps": ["127.0.0.1:7000", "127.0.0.1:7001"], "worker": ["-", "-", "-", "-"]});
        assert_eq!(found["cluster"], expected, "{}", rank.name);
        let expected = match number {
            0 | 1 => json!({"type": "ps", "index": number}),
            _ => json!({"type": "worker", "index": number - 2}),
        };
        assert_eq!(found["task"], expected);
    }
}

/// A killed task that starts again keeps its index, and later askers learn its new address.
#[test]
fn a_task_that_comes_again_gets_its_index_back() {
    let rendezvous = Rendezvous::start(2, 2);
    let start = |program: &str, job: &str, id: &str| {
        let flags = [&*format!("--job-name={job}"), "--task-id", id];
        TestProcess::start(id, &mut task(program, &rendezvous.address, 2, &flags))
    };
    let mut servers = ["container_2", "container_1"].map(|id| start(DAEMON, "ps", id));
    let mut workers = ["container_9", "container_3"].map(|id| start(TOOL, "worker", id));
    let found = workers.each_mut().map(|worker| last(&worker.succeed()));
    assert_eq!(found.each_ref().map(|found| &found["task"]["index"]), [&json!(1), &json!(0)]);
    let addresses = servers.each_mut().map(served);
    let gathered = json!([addresses[1], addresses[0]]);
    assert_eq!(found.each_ref().map(|found| &found["cluster"]["ps"]), [&gathered; 2]);
    servers[0].signal(Signal::KILL);
    servers[0].finish();

    servers[0] = start(DAEMON, "ps", "container_2");
    let now = served(&mut servers[0]);
    // A task of another id takes the place of one that has ended.
    let found = last(&start(TOOL, "worker", "container_5").succeed());
    assert_eq!(found["cluster"]["ps"], json!([addresses[1], now]));
    assert_eq!(found["task"], json!({"type": "worker", "index": 0}));
    for server in &mut servers {
        server.signal(Signal::TERM);
        server.finish();
    }

    let (output, errors) = rendezvous.finish();
    let expected = format!(
        "flags       --ps-hosts {1},{0} --worker-hosts -,-\n\
         json        {{\"ps\":[\"{1}\",\"{0}\"],\"worker\":[\"-\",\"-\"]}}\n",
        addresses[0], addresses[1]
    );
    assert_eq!(output, expected);
    assert!(errors.contains("/job:ps/task:1 has registered again\n"), "{errors}");
}

/// Returns the address that a daemon says it serves on.
fn served(daemon: &mut TestProcess) -> String {
    let mut line = String::new();
    BufReader::new(daemon.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    line.trim().rsplit_once(" serves on ").unwrap().1.to_owned()
}

#[test]
fn a_task_that_disagrees_or_waits_in_vain_says_why() {
    let rendezvous = Rendezvous::start(1, 2);
    let address = &*rendezvous.address;
    let fails = |flags: &[&str]| {
        let (status, _, errors) =
            TestProcess::start("task", &mut task(TOOL, address, 1, flags)).finish();
        assert_eq!(status.code(), Some(1), "{errors}");
        errors
    };
    let errors = fails(&["--job-name=worker", "--task-index=1", "--rendezvous-timeout-ms=5000"]);
    let waits = "1 of 3 tasks have registered; missing: ps 0, worker 0";
    let expected = format!(
        "pushpull: waits for the cluster: {waits}\n\
         pushpull: cannot gather the cluster at {address} within 5s: {waits}\n"
    );
    assert_eq!(errors, expected);
    let other = format!(
        "pushpull: cannot join the cluster at {address}: num_workers is \"2\" there, and \"3\" in \
         this process\n"
    );
    // The later of two values for a flag would be refused by the parser.
    let mut command = Command::new(TOOL);
    command.args(["resolve", "--resolve=flags", "--rendezvous", address, "--job-name=worker"]);
    command.args(["--num-ps=1", "--num-workers=3"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    assert_eq!(TestProcess::start("task", &mut command).finish().2, other);
    let errors = fails(&["--job-name=worker", "--task-index=2"]);
    assert!(errors.ends_with("task 2 of job \"worker\" is not accepted: the job has 2 tasks\n"));
    let [silent] = <[String; 1]>::try_from(free_addresses(1)).unwrap();
    let mut command =
        task(TOOL, &silent, 1, &["--job-name=worker", "--rendezvous-timeout-ms=2000"]);
    let (_, _, errors) = TestProcess::start("task", &mut command).finish();
    assert!(errors.contains("within 2s: the rendezvous is not reached: "), "{errors}");
}

/// The port of `--listen` is told to the other tasks before the daemon binds it.
#[test]
fn a_server_at_a_rendezvous_listens_at_a_port_that_can_be_told() {
    let [address] = <[String; 1]>::try_from(free_addresses(1)).unwrap();
    for listen in ["127.0.0.1:0", "unix:/tmp/ps.sock"] {
        let flags = ["--job-name=ps", "--listen", listen];
        let (status, _, errors) =
            TestProcess::start("ps", &mut task(DAEMON, &address, 1, &flags)).finish();
        assert!(!status.success(), "{errors}");
        let expected = format!("--listen {listen}: the other tasks learn the port");
        assert!(errors.contains(&expected), "{errors}");
    }
}

/// Peers that speak no protocol, another one, or only its beginning, keep no task out.
#[test]
fn strangers_at_the_rendezvous_keep_no_task_out() {
    let rendezvous = Rendezvous::start(1, 2);
    let golden = std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/common/tests/hostile/meta_too_long_for_a_stranger.bin"
    ));
    let texts: [&[u8]; 5] = [b"", b"GET / HTTP/1.1\r\n\r\n", &[0; 4096], b"ppsh", &golden.unwrap()];
    let strangers: Vec<TcpStream> = texts
        .iter()
        .cycle()
        .take(200)
        .map(|text| {
            let mut stranger = TcpStream::connect(&rendezvous.address).unwrap();
            // The rendezvous may have closed the connection already.
            let _ = stranger.write_all(text);
            stranger
        })
        .collect();
    let tasks = ["ps", "worker", "worker"].map(|job| {
        let flags = [&*format!("--job-name={job}")];
        TestProcess::start(job, &mut task(TOOL, &rendezvous.address, 1, &flags))
    });
    for mut task in tasks {
        let found = last(&task.succeed());
        assert_eq!(found["cluster"]["worker"], json!(["-", "-"]));
    }
    let mut stranger = &strangers[1];
    stranger.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert!(!matches!(stranger.read(&mut [0; 1]), Ok(1..)), "a stranger is answered");
    rendezvous.finish();
}

/// Each task has its own token. One that is taken back ends the connection of its task, which cannot
/// come again.
#[test]
fn a_task_at_the_rendezvous_is_only_whom_its_token_names() {
    let folder = tempfile::tempdir().unwrap();
    let entry = |name: &str, digit: &str, tasks: &str| {
        format!("token {name} {} roles=task tasks={tasks}\n", digit.repeat(32))
    };
    let write = |name: &str, text: &str| {
        let (draft, path) = (folder.path().join("draft"), folder.path().join(name));
        std::fs::write(&draft, text).unwrap();
        std::fs::set_permissions(&draft, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::rename(&draft, &path).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let first = entry("first", "1", "/job:worker/task:0");
    let second = entry("second", "2", "/job:worker/task:1");
    let server = entry("server", "3", "/job:ps/task:*");
    let all = write("all", &[&*first, &second, &server].concat());
    let mut rendezvous = Rendezvous::start_with(1, 2, &["--tokens", &all]);
    let address = rendezvous.address.clone();
    // Its own file says that the task may be any.
    let forged = write("forged", &entry("first", "1", "/job:worker/task:*"));
    let fails = |tokens: &str, flags: &[&str]| {
        let limit = ["--tokens", tokens, "--rendezvous-timeout-ms=5000"];
        let mut task = task(TOOL, &address, 1, &[&limit[..], flags].concat());
        let (status, _, errors) = TestProcess::start("a refused task", &mut task).finish();
        assert!(!status.success());
        errors
    };
    for flags in [&["--task-index=1"][..], &["--task-id=any"]] {
        let errors = fails(&forged, &[&["--job-name=worker"], flags].concat());
        assert!(errors.contains("denied"), "{flags:?}: {errors}");
    }
    let joins = |name: &str, entry: &str, flags: &[&str]| {
        let tokens = write(name, entry);
        let flags = [&["--tokens", &tokens], flags].concat();
        TestProcess::start(name, &mut task(TOOL, &address, 1, &flags))
    };
    let errors = BufReader::new(rendezvous.process.child.stderr.take().unwrap()).lines();
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || errors.for_each(|line| _ = sender.send(line.unwrap())));
    let says = |text: &str| {
        while !lines.recv_timeout(LONG).expect(text).contains(text) {}
    };
    let lonely = ["--job-name=worker", "--task-index=1", "--rendezvous-timeout-ms=8000"];
    let mut worker = joins("second", &second, &lonely);
    says("first may not be this task");
    says("missing: ps 0, worker 0");
    write("all", &[&*first, &server].concat());
    says("closed a connection of second");
    let (status, _, told) = worker.finish();
    let is_out = told.contains("does not prove that it knows the access token second");
    assert!(!status.success() && is_out, "{told}");

    write("all", &[&*first, &second, &server].concat());
    let worker = |name: &str, entry: &str, index: &str| {
        joins(name, entry, &["--job-name=worker", &format!("--task-index={index}")])
    };
    let mut tasks = [
        worker("first", &first, "0"),
        worker("second", &second, "1"),
        joins("server", &server, &["--job-name=ps", "--task-id=any"]),
    ];
    for task in &mut tasks {
        assert_eq!(last(&task.succeed())["cluster"]["worker"], json!(["-", "-"]));
    }
    let (status, _, _) = rendezvous.process.finish();
    assert!(status.success());
}
