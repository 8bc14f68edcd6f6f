//! Processes that prove who they are: the tool makes certificates and tokens, the daemon and workers
//! use them, and those who prove nothing stay outside.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use pushpull::blocking::{FunctionClient, Worker};
use pushpull::error::Chain;
use pushpull::security::{CredentialFiles, Credentials};
use pushpull::services::{Call, FunctionClientConfig};
use pushpull::{ClusterSpec, TaskId, VariableSpec, WorkerConfig};
use rustix::process::Signal;

use super::test_process::{LONG, TestProcess, free_addresses};

const TOOL: &str = env!("CARGO_BIN_EXE_pushpull");

/// A folder with an authority, a certificate of ps 0, and tokens.
struct Keys(tempfile::TempDir);

impl Keys {
    fn new() -> Keys {
        let keys = Keys(tempfile::tempdir().unwrap());
        let certs = keys.path("certs");
        tool(&["cert", "new-ca", &certs]);
        keys.sign(&["--task", "/job:ps/task:0", "--host", "127.0.0.1"]);
        keys.sign(&["--task", "/job:worker/task:*"]);
        let trainers = ["--role", "worker,chief", "--task", "/job:worker/task:*"];
        keys.token("trainers", &trainers);
        keys
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn sign(&self, names: &[&str]) {
        tool(&[&["cert", "new", &self.path("certs")], names].concat());
    }

    fn token(&self, name: &str, gives: &[&str]) {
        let file = self.path("tokens");
        tool(&[&["token", "new", "--name", name, "--file", &file], gives].concat());
    }

    /// Removes the entry of a token.
    fn revoke(&self, name: &str) {
        let path = self.path("tokens");
        let text = std::fs::read_to_string(&path).unwrap();
        let kept: Vec<&str> =
            text.lines().filter(|line| line.split(' ').nth(1) != Some(name)).collect();
        assert_eq!(kept.len() + 1, text.lines().count());
        std::fs::write(path, kept.join("\n") + "\n").unwrap();
    }

    fn tokens(&self) -> CredentialFiles {
        CredentialFiles::new().tokens(self.path("tokens"))
    }

    fn over_tls(&self) -> Credentials {
        self.tokens().authority(self.path("certs/ca.pem")).open().unwrap()
    }

    /// Starts a daemon with these flags.
    fn daemon(&self, address: &str, flags: &[&str]) -> TestProcess {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command.args(["--ps-hosts", address, "--worker-hosts", "127.0.0.1:1,127.0.0.1:2"]);
        command.args(["--learning-rate", "0.1"]).args(flags).current_dir(self.0.path());
        TestProcess::start("daemon", command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }
}

const TLS: [&str; 6] = [
    "--tls-ca",
    "certs/ca.pem",
    "--tls-cert",
    "certs/{job}-{task}.pem",
    "--tls-key",
    "certs/{job}-{task}.key",
];
const TOKENS: [&str; 2] = ["--tokens", "tokens"];

fn run(arguments: &[&str]) -> Output {
    Command::new(TOOL).args(arguments).output().unwrap()
}

/// Runs the tool, and returns what it prints.
fn tool(arguments: &[&str]) -> String {
    let said = run(arguments);
    assert!(said.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8(said.stdout).unwrap()
}

/// Runs the tool, and returns the fault that it prints.
fn fault(arguments: &[&str]) -> String {
    let said = run(arguments);
    assert!(!said.status.success(), "{arguments:?}");
    String::from_utf8(said.stderr).unwrap()
}

fn config(address: &str, index: u32, credentials: Option<Credentials>) -> WorkerConfig {
    let cluster = ClusterSpec::builder().job("ps", [address]).workers(2).build().unwrap();
    WorkerConfig::new(cluster, TaskId::worker(index)).credentials(credentials).connect_timeout(LONG)
}

fn join(config: WorkerConfig) -> Result<Worker, String> {
    let joined = Worker::connect(config).and_then(|mut worker| {
        worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ())?;
        Ok(worker)
    });
    joined.map_err(|error| Chain(&error).to_string())
}

/// Takes a step, and returns how many there are.
fn step(worker: &mut Worker) -> Result<u64, String> {
    let told = |error: pushpull::Error| Chain(&error).to_string();
    let token = worker.token().map_err(told)?.unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    match worker.push(token, gradients).map_err(told)? {
        pushpull::Push::Applied { step, .. } => Ok(step),
        other => panic!("{other:?}"),
    }
}

fn stop(daemon: &mut TestProcess) -> String {
    daemon.signal(Signal::TERM);
    let (status, output, errors) = daemon.finish();
    assert!(status.success(), "{output}{errors}");
    errors
}

fn mode(path: &str) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    Path::new(path).metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn the_tool_makes_files_that_their_owner_alone_can_read() {
    let keys = Keys::new();
    let files = ["certs/ca.key", "certs/ps-0.key", "certs/worker.key", "tokens"];
    assert_eq!(files.map(|file| mode(&keys.path(file))), [0o600; 4]);
    assert_eq!(mode(&keys.path("certs/ps-0.pem")), 0o644);
    let printed = tool(&["token", "new", "--role", "client", "--function", "eval*"]);
    assert!(
        printed.starts_with("token client-")
            && printed.ends_with(" roles=client functions=eval*\n")
    );

    let certs = keys.path("certs");
    assert!(fault(&["cert", "new-ca", &certs]).contains("ca.key: File exists"), "it is kept");
    let none = fault(&["cert", "new", &keys.path("none"), "--task", "/job:ps/task:0"]);
    assert!(none.contains("there is no authority; create one by pushpull cert new-ca"), "{none}");
    assert!(fault(&["cert", "new", &certs, "--task", "ps:0"]).contains("such as /job:ps/task:0"));
    assert!(fault(&["cert", "new", &certs]).contains("--task <TASK>"));
    assert!(fault(&["token", "new", "--role", "root"]).contains("no role is named \"root\""));
    assert!(fault(&["token", "new", "--role", "client"]).contains("functions="));
    let again = fault(&[
        "token",
        "new",
        "--role",
        "reader",
        "--name",
        "trainers",
        "--file",
        &keys.path("tokens"),
    ]);
    assert!(again.contains("trainers is also the name of line 1"), "{again}");
}

#[test]
fn a_worker_with_a_token_trains_over_tls_and_others_stay_outside() {
    let keys = Keys::new();
    let address = &free_addresses(1)[0];
    let mut daemon = keys.daemon(address, &[&TLS[..], &TOKENS].concat());
    let mut worker = join(config(address, 0, Some(keys.over_tls()))).unwrap();
    assert_eq!(step(&mut worker), Ok(1));

    let without = join(config(address, 1, None)).err().unwrap();
    assert!(without.contains("this server speaks TLS only"), "{without}");
    let certificate = CredentialFiles::new()
        .certificate(keys.path("certs/worker.pem"), keys.path("certs/worker.key"))
        .authority(keys.path("certs/ca.pem"));
    let mut second = join(config(address, 1, Some(certificate.open().unwrap()))).unwrap();
    assert_eq!(step(&mut second), Ok(2));
    let unproven = CredentialFiles::new().authority(keys.path("certs/ca.pem")).open().unwrap();
    let denied = join(config(address, 1, Some(unproven))).err().unwrap();
    assert!(denied.contains("denied"), "{denied}");
    let errors = stop(&mut daemon);
    let told = "Worker /job:worker/task:1 from 127.0.0.1 may not connect: it has neither a token nor a certificate";
    assert!(errors.contains(told), "{errors}");
    let secrets = std::fs::read_to_string(keys.path("tokens")).unwrap();
    let secret = secrets.split(' ').nth(2).unwrap();
    assert!(secret.len() == 64 && !errors.contains(&secret[..16]), "{errors}");
}

#[test]
fn a_token_that_is_removed_ends_its_connections_and_drops_no_push() {
    let keys = Keys::new();
    keys.token("trainers-2", &["--role", "worker", "--task", "/job:worker/task:1"]);
    let address = &free_addresses(1)[0];
    let mut daemon = keys.daemon(address, &TOKENS);
    let first = keys.tokens().open().unwrap();
    // The second worker's file has its own token alone.
    let own = keys.path("own");
    let text = std::fs::read_to_string(keys.path("tokens")).unwrap();
    std::fs::write(&own, text.lines().nth(1).unwrap()).unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o600)).unwrap();
    let second = CredentialFiles::new().tokens(&own).open().unwrap();
    let mut kept = join(config(address, 0, Some(first))).unwrap();
    let mut revoked = join(config(address, 1, Some(second))).unwrap();
    assert_eq!((step(&mut kept), step(&mut revoked)), (Ok(1), Ok(2)));

    keys.revoke("trainers-2");
    let mut steps = 2;
    let begun = Instant::now();
    let ended = loop {
        match step(&mut revoked) {
            Ok(step) => steps = step,
            Err(ended) => break ended,
        }
        assert!(begun.elapsed() < LONG, "it still trains");
    };
    assert!(ended.contains("does not prove that it knows the access token trainers-2"), "{ended}");
    // Of its last push nobody has told it whether it counts. The others count once.
    let next = step(&mut kept).unwrap();
    assert!((steps + 1..=steps + 2).contains(&next), "{next} after {steps}");
    let errors = stop(&mut daemon);
    assert!(errors.contains("closed a connection of trainers-2"), "{errors}");
}

#[test]
fn a_client_calls_the_functions_that_its_token_names() {
    let keys = Keys::new();
    keys.token("caller", &["--role", "client", "--function", "add"]);
    let address = &free_addresses(1)[0];
    let mut daemon = keys.daemon(address, &[&TLS[..], &TOKENS].concat());
    let connect = |credentials: Option<Credentials>| {
        let config = FunctionClientConfig::new(address).credentials(credentials).timeout(LONG);
        FunctionClient::connect(config.connect_timeout(LONG))
    };
    let client = connect(Some(keys.over_tls())).unwrap();
    let call = |function: &str| {
        let call = Call::new(function).feed("a", 1.0_f32).feed("b", 3.0_f32);
        client.call(call).map_err(|error| Chain(&error).to_string())
    };
    assert!(call("add").is_ok());
    for function in ["mul", "no-such-function"] {
        let denied = call(function).err().unwrap();
        assert!(denied.contains("denied"), "{function}: {denied}");
    }
    stop(&mut daemon);
}

/// The foreign TLS peer: versions, names, resumption and the close.
#[test]
fn openssl_speaks_tls_1_3_with_the_daemon() {
    if !Command::new("openssl").arg("version").output().is_ok_and(|said| said.status.success()) {
        println!("SKIPPED: no foreign peer speaks TLS, there is no openssl");
        return;
    }
    let keys = Keys::new();
    let address = &free_addresses(1)[0];
    let mut daemon = keys.daemon(address, &[&TLS[..], &TOKENS].concat());
    // The first connection waits for the daemon.
    join(config(address, 0, Some(keys.over_tls()))).unwrap();
    let openssl = |flags: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(["s_client", "-connect", address, "-CAfile", &keys.path("certs/ca.pem")]);
        command.args(["-verify_return_error"]).args(flags);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = TestProcess::start("openssl", command);
        let (status, output, errors) = process.finish();
        (status.success(), output + &errors)
    };
    let (is_well, said) = openssl(&["-verify_ip", "127.0.0.1", "-alpn", "pushpull/1"]);
    assert!(is_well, "{said}");
    for expected in ["Verify return code: 0 (ok)", "TLSv1.3", "ALPN protocol: pushpull/1"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(!said.contains("Reused") && !said.contains("New Session Ticket"), "{said}");
    for (flags, told) in [
        (&["-tls1_2"][..], "alert protocol version"),
        (&["-verify_ip", "10.0.0.1"], "IP address mismatch"),
        (&["-alpn", "http/1.1"], "no application protocol"),
    ] {
        let (is_well, said) = openssl(flags);
        assert!(!is_well && said.contains(told), "{flags:?}: {said}");
    }
    stop(&mut daemon);
}

/// A client that is written from the protocol page proves itself by a token, and by a certificate.
#[test]
fn a_client_in_another_language_proves_who_it_is() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|said| said.status.success()) {
        println!("SKIPPED: cannot run the client in Python without python3");
        return;
    }
    let keys = Keys::new();
    let certificate = [
        "--tls-ca",
        "certs/ca.pem",
        "--tls-cert",
        "certs/worker.pem",
        "--tls-key",
        "certs/worker.key",
    ];
    for (server, client) in [(&TOKENS[..], &TOKENS[..]), (&TLS, &certificate)] {
        let address = &free_addresses(1)[0];
        let mut daemon = keys.daemon(address, server);
        let program = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/protocol_client.py");
        let run = |flags: &[&str]| {
            let mut command = Command::new("python3");
            command.arg(&program).arg(address).args(["--learning-rate", "0.1", "--steps", "20"]);
            command.args(flags).current_dir(keys.0.path());
            let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
            TestProcess::start("client", command).finish()
        };
        let (status, output, errors) = run(client);
        assert!(status.success(), "{client:?}: {output}{errors}");
        let (status, _, errors) = run(&[]);
        assert!(!status.success() && errors.contains("Refused"), "{errors}");
        stop(&mut daemon);
    }
}

#[test]
fn an_address_that_others_reach_needs_tls_and_proofs() {
    let keys = Keys::new();
    for flags in [&[][..], &TOKENS, &TLS[2..]] {
        let mut daemon = keys.daemon("0.0.0.0:9", flags);
        let (status, _, errors) = daemon.finish();
        assert_eq!(status.code(), Some(2), "{flags:?}: {errors}");
        assert!(errors.contains("everybody would be let in: give --tls-cert"), "{errors}");
    }
    for (flags, told) in [
        (&["--tokens", "none"][..], "cannot read none: No such file"),
        (&["--tls-cert", "certs/ps-0.pem"], "--tls-key <FILE>"),
        (&["--tls-ca", "tokens"], "cannot use tokens: it has no certificate"),
    ] {
        let mut daemon = keys.daemon("127.0.0.1:9", flags);
        let (status, _, errors) = daemon.finish();
        assert_eq!(status.code(), Some(2), "{flags:?}: {errors}");
        assert!(errors.contains(told), "{errors}");
    }
}

/// The daemon with everything listens where others reach it.
#[test]
fn a_daemon_with_credentials_listens_on_all_addresses() {
    let keys = Keys::new();
    let port = free_addresses(1)[0].rsplit_once(':').unwrap().1.to_owned();
    let listen = format!("0.0.0.0:{port}");
    let flags = [&TLS[..], &TOKENS, &["--listen", &listen]].concat();
    let mut daemon = keys.daemon(&format!("127.0.0.1:{port}"), &flags);
    let mut worker = join(config(&format!("127.0.0.1:{port}"), 0, Some(keys.over_tls()))).unwrap();
    assert_eq!(step(&mut worker), Ok(1));
    // A certificate that is replaced is used by the next connection.
    keys.sign(&["--task", "/job:ps/task:0"]);
    std::thread::sleep(Duration::from_millis(600));
    let mut second = join(config(&format!("127.0.0.1:{port}"), 1, Some(keys.over_tls()))).unwrap();
    assert_eq!((step(&mut second), step(&mut worker)), (Ok(2), Ok(3)));
    let errors = stop(&mut daemon);
    assert!(!errors.contains("insecure"), "{errors}");
}

/// The line stands in the log of each start, not only of the first.
#[test]
fn an_insecure_daemon_says_so_at_each_start() {
    let keys = Keys::new();
    let port = free_addresses(1)[0].rsplit_once(':').unwrap().1.to_owned();
    let address = format!("127.0.0.1:{port}");
    let listen = format!("0.0.0.0:{port}");
    let line = format!(
        "insecure: every machine that reaches {listen} can change the variables and stop the server\n"
    );
    for start in ["first", "second"] {
        let mut daemon = keys.daemon(&address, &["--listen", &listen, "--insecure"]);
        // The connection waits for the daemon.
        let mut worker = join(config(&address, 0, None)).unwrap();
        assert_eq!(step(&mut worker), Ok(1), "{start}");
        let errors = stop(&mut daemon);
        assert_eq!(errors.matches(&line).count(), 1, "{start}: {errors}");
    }
}

/// A user and a group that own nothing.
const NOBODY: u32 = 65_534;

/// Returns a path of the tool that another user can run: its own, or that of a copy in a folder.
fn tool_for_others(folder: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    // A folder above the tool may be closed to others.
    if Command::new(TOOL).arg("--version").uid(NOBODY).gid(NOBODY).output().is_ok() {
        return TOOL.into();
    }
    let copy = folder.join("pushpull");
    std::fs::copy(TOOL, &copy).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755)).unwrap();
    copy
}

#[test]
fn a_process_of_another_user_needs_a_token_at_a_unix_socket() {
    use std::os::unix::fs::{PermissionsExt, chown};
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can start a process of another user");
        return;
    }
    if let Err(error) = Command::new("true").uid(NOBODY).gid(NOBODY).output() {
        println!("SKIPPED: root cannot start a process of another user here: {error}");
        return;
    }
    let permit = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let keys = Keys::new();
    keys.token("operators", &["--role", "admin"]);
    // Others can pass the folder, and not list it.
    permit(keys.0.path(), 0o711);
    let socket = keys.path("ps.sock");
    let address = &format!("unix:{socket}");
    let mut daemon = keys.daemon(address, &TOKENS);
    // The connection waits for the daemon.
    let mut worker = join(config(address, 0, Some(keys.tokens().open().unwrap()))).unwrap();
    assert_eq!(step(&mut worker), Ok(1));
    permit(Path::new(&socket), 0o777);

    let tool = tool_for_others(keys.0.path());
    let status = |flags: &[&str]| {
        let mut command = Command::new(&tool);
        command.args(["admin", "status", "--ps-hosts", address]).args(flags);
        command.current_dir("/").uid(NOBODY).gid(NOBODY);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let (status, output, errors) = TestProcess::start("status", &mut command).finish();
        (status.success(), output, errors)
    };
    let (is_admitted, output, errors) = status(&[]);
    assert!(!is_admitted && errors.contains("denied"), "{output}{errors}");
    // The file of the daemon is not theirs to read.
    let (is_admitted, output, errors) = status(&["--tokens", &keys.path("tokens")]);
    assert!(!is_admitted && errors.contains("Permission denied"), "{output}{errors}");
    let own = keys.path("own");
    let text = std::fs::read_to_string(keys.path("tokens")).unwrap();
    std::fs::write(&own, text.lines().nth(1).unwrap()).unwrap();
    permit(Path::new(&own), 0o600);
    chown(&own, Some(NOBODY), Some(NOBODY)).unwrap();
    let (is_admitted, output, errors) = status(&["--tokens", &own]);
    assert!(is_admitted && output.contains("at step 1"), "{output}{errors}");
    // The worker of the daemon's own user is not kept from its work.
    assert_eq!(step(&mut worker), Ok(2));
    let errors = stop(&mut daemon);
    let told = "from this host may not connect: it has neither a token nor a certificate";
    assert!(errors.contains(told), "{errors}");
}

/// No secret is in the memory that a core dump has.
#[test]
fn a_core_dump_has_no_secret_of_a_token() {
    if Command::new("gcore").arg("--help").output().is_err() {
        println!("SKIPPED: no core is dumped, there is no gcore (gdb)");
        return;
    }
    let keys = Keys::new();
    let address = &free_addresses(1)[0];
    let mut daemon = keys.daemon(address, &TOKENS);
    join(config(address, 0, Some(keys.tokens().open().unwrap()))).unwrap();
    let core = keys.path("core");
    let pid = daemon.child.id().to_string();
    let dumped = Command::new("gcore").args(["-o", &core, &pid]).output().unwrap();
    assert!(dumped.status.success(), "{}", String::from_utf8_lossy(&dumped.stderr));
    let mut bytes = Vec::new();
    std::fs::File::open(format!("{core}.{pid}")).unwrap().read_to_end(&mut bytes).unwrap();
    let text = std::fs::read_to_string(keys.path("tokens")).unwrap();
    let digits = text.split(' ').nth(2).unwrap();
    let secret: Vec<u8> = (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect();
    let has = |needle: &[u8]| bytes.windows(needle.len()).any(|window| window == needle);
    assert!(has(b"trainers"), "the name is in it");
    assert!(!has(digits.as_bytes()) && !has(&secret), "the secret is in it");
    stop(&mut daemon);
}

/// An operator asks, saves, finishes and stops by a token of the role; other tokens give none of it.
#[test]
fn an_operator_administers_a_training_and_others_do_not() {
    let keys = Keys::new();
    keys.sign(&["--task", "/job:ps/task:1"]);
    keys.token("operators", &["--role", "admin"]);
    let addresses = free_addresses(2).join(",");
    let start = |task: &str| {
        let task = ["--task-index", task, "--checkpoint-dir", "checkpoints"];
        keys.daemon(&addresses, &[&TLS[..], &TOKENS, &task].concat())
    };
    let [mut first, mut second] = [start("0"), start("1")];
    let cluster = ClusterSpec::builder().job("ps", addresses.split(',')).workers(2);
    let config = WorkerConfig::new(cluster.build().unwrap(), TaskId::worker(0));
    let config = config.credentials(keys.over_tls()).connect_timeout(LONG);
    let mut worker = join(config).unwrap();
    assert_eq!(step(&mut worker), Ok(1));

    let file = |name: &str, token: &str| {
        let text = std::fs::read_to_string(keys.path("tokens")).unwrap();
        let own = text.lines().find(|line| line.split(' ').nth(1) == Some(token)).unwrap();
        let path = keys.path(name);
        std::fs::write(&path, own).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        path
    };
    let operators = file("operators", "operators");
    let trainers = file("trainers", "trainers");
    let ca = keys.path("certs/ca.pem");
    let admin = |verb: &str, tokens: &str, flags: &[&str]| {
        let of_all = ["admin", verb, "--ps-hosts", &addresses, "--tls-ca", &ca, "--tokens", tokens];
        run(&[&of_all, flags].concat())
    };
    for verb in ["status", "save", "finish", "stop"] {
        let said = admin(verb, &trainers, &["--timeout-s", "5"]);
        let error = String::from_utf8(said.stderr).unwrap();
        assert!(!said.status.success() && error.contains("denied"), "{verb}: {error}");
    }
    let told = |verb: &str, flags: &[&str]| {
        let said = admin(verb, &operators, flags);
        let error = String::from_utf8(said.stderr).unwrap();
        assert!(said.status.success(), "{verb}: {error}");
        String::from_utf8(said.stdout).unwrap()
    };
    let page = told("status", &[]);
    let begin = "training, at step 1, restore epoch 1\n/job:worker/task:0: present, heard ";
    assert!(page.starts_with(begin), "{page}");
    assert!(page.ends_with("/job:worker/task:1: has never joined\n"), "{page}");
    let json: serde_json::Value = serde_json::from_str(&told("status", &["--json"])).unwrap();
    assert_eq!(json["step"], 1);
    assert_eq!(json["members"][0]["task"], "/job:worker/task:0");
    assert_eq!(json["never_joined"], serde_json::json!(["/job:worker/task:1"]));
    assert_eq!(told("save", &[]), "saved ckpt-1-1 at step 1\n");
    assert_eq!(told("finish", &[]), "finished: no worker gets another token\n");
    assert_eq!(worker.token().unwrap().map(drop), None);
    assert!(told("status", &[]).starts_with("finished by order, at step 1"));
    assert_eq!(told("stop", &[]), "stopped\n");
    let error = worker.finish().unwrap_err();
    assert!(matches!(error, pushpull::Error::ServerStopped { .. }), "{error}");
    let by = "by /job:admin/task:0, who is operators";
    for (daemon, task, orders) in [
        (&mut first, 0, &["save a checkpoint", "finish the training", "stop"][..]),
        (&mut second, 1, &["stop"]),
    ] {
        let (status, output, errors) = daemon.finish();
        assert!(status.success(), "{output}{errors}");
        for order in orders {
            let line = format!("/job:ps/task:{task}/shard:0 was told to {order} {by}\n");
            assert!(errors.contains(&line), "{line} is not in {errors}");
        }
    }
}

/// An administrator needs no server but the one that is told to stop.
#[test]
fn servers_are_stopped_although_the_step_owner_is_gone() {
    let keys = Keys::new();
    keys.token("operators", &["--role", "admin"]);
    let addresses = free_addresses(2).join(",");
    let start =
        |task: &str| keys.daemon(&addresses, &[&TOKENS[..], &["--task-index", task]].concat());
    let [mut first, mut second] = [start("0"), start("1")];
    let cluster = ClusterSpec::builder().job("ps", addresses.split(',')).workers(2);
    let config = WorkerConfig::new(cluster.build().unwrap(), TaskId::worker(0));
    let config = config.credentials(keys.tokens().open().unwrap()).connect_timeout(LONG);
    join(config).unwrap();
    stop(&mut first);
    let tokens = keys.path("tokens");
    let flags = ["--ps-hosts", &addresses, "--tokens", &tokens, "--timeout-s", "2"];
    let said = run(&[&["admin", "stop"][..], &flags].concat());
    let error = String::from_utf8(said.stderr).unwrap();
    assert!(!said.status.success() && error.contains("not stopped: /job:ps/task:0: "), "{error}");
    assert!(!error.contains("/job:ps/task:1"), "{error}");
    let (status, output, errors) = second.finish();
    assert!(status.success(), "{output}{errors}");
}
