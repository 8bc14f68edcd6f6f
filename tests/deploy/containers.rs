//! The images in containers under podman: their sizes, a training of three containers on a network of their
//! own, and a daemon without `/dev/shm`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::tasks::{Programs, check_result};

/// The most bytes of an image.
const IMAGE_BYTES_MAX: u64 = 20_000_000;

/// The network of the containers, and the addresses in it of one that is killed.
const SUBNET: &str = "10.79.13.0/24";
const ADDRESS: &str = "10.79.13.100";
const MAC: &str = "02:00:0a:4f:0d:64";

/// The time after which a container hangs.
const LIMIT: Duration = Duration::from_secs(100);

/// Images, containers and a network of this test alone.
pub(crate) struct Podman {
    folder: tempfile::TempDir,
    network: String,
}

impl Podman {
    /// Finds podman, or says what is absent.
    pub(crate) fn find() -> Result<Podman, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("podman runs these containers as root".to_owned());
        }
        for program in ["podman", "runc", "iptables"] {
            let version = Command::new(program).arg("--version").output();
            if !version.is_ok_and(|output| output.status.success()) {
                return Err(format!("there is no {program}"));
            }
        }
        let network = format!("pushpull{}", std::process::id());
        Ok(Podman { folder: tempfile::tempdir().unwrap(), network })
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs podman within a limit of time.
    fn output(&self, line: &str) -> Output {
        let mut command = Command::new("timeout");
        // These work without a daemon, without an overlay and in a container.
        command.args(["-k", "5", "120", "podman", "--runtime=runc", "--storage-driver=vfs"]);
        command.args(["--cgroup-manager=cgroupfs", "--root"]).arg(self.path("root"));
        command.arg("--runroot").arg(self.path("run"));
        command.arg("--network-config-dir").arg(self.path("networks"));
        command.args(line.split_ascii_whitespace()).stdin(Stdio::null());
        command.output().unwrap()
    }

    /// Runs podman. Returns the output, or the exit status and the errors.
    fn run(&self, line: &str) -> Outcome {
        let output = self.output(line);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(format!(
                "podman {line}: {}: {}\n{}",
                output.status,
                text(&output.stdout),
                text(&output.stderr)
            )),
        }
    }

    /// Starts a container with the name of its task.
    fn start(&self, task: &str, flags: &str, command: &str) -> Outcome {
        let network = &self.network;
        self.run(&format!(
            "run --detach --name {task} --network {network} {LIMITS} {flags} {} {command}",
            image(command.split(' ').next().unwrap_or_default())
        ))
    }

    /// Waits until a container has ended. Returns its output, or its exit code with the output.
    fn finish(&self, task: &str) -> Outcome {
        let code = self.run(&format!("wait {task}"));
        let text = self.said(task);
        let code = code.map_err(|fault| format!("{fault}\n{text}"))?;
        if code == "0" { Ok(text) } else { Err(format!("{task} ended with {code}: {text}")) }
    }

    /// Returns the errors and the output of a container.
    fn said(&self, task: &str) -> String {
        let Output { stdout, stderr, .. } = self.output(&format!("logs {task}"));
        String::from_utf8_lossy(&[stderr, stdout].concat()).into_owned()
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Each may be absent.
        let _ = self.run("rm --force --time 0 --all");
        let _ = self.run(&format!("network rm --force {}", self.network));
        let _ = self.run("rmi --force --all");
    }
}

/// A container may not raise its limits, so they are below those of any machine.
const LIMITS: &str = "--ulimit nofile=1024:1024 --ulimit nproc=100:100";

/// Builds the images and runs containers of them.
pub(crate) fn check(programs: &Programs, podman: &Podman) -> Vec<(&'static str, Outcome)> {
    let built = build(programs, podman);
    let is_built = built.is_ok();
    let mut outcomes = vec![("the images", built)];
    if is_built {
        let network = format!("network create --internal --subnet {SUBNET} {}", podman.network);
        let trained = podman.run(&network).and_then(|_| train(podman));
        outcomes.push(("three containers on an internal network", trained));
        outcomes.push(("a container that is killed", train_with_kill(podman)));
        outcomes.push(("a container without /dev/shm", without_shared_memory(podman)));
    }
    outcomes
}

/// Builds the images from the recipe, with the folder of the programs as its context.
fn build(programs: &Programs, podman: &Podman) -> Outcome {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/deploy/Containerfile");
    let context = programs.folder.display();
    let mut sizes = Vec::new();
    for program in ["pushpull-ps", "digits"] {
        let image = image(program);
        let target = format!("--target {program} --tag {image} --file {recipe}");
        podman.run(&format!("build --quiet {target} {context}"))?;
        let bytes = podman.run(&format!("image inspect --format {{{{.Size}}}} {image}"))?;
        match bytes.parse::<u64>() {
            Ok(size) if size < IMAGE_BYTES_MAX => sizes.push(format!("{program}: {size} bytes")),
            _ => return Err(format!("{program}: {bytes} bytes, of {IMAGE_BYTES_MAX} at most")),
        }
    }
    Ok(sizes.join(", "))
}

/// Returns the name of an image.
fn image(program: &str) -> String {
    format!("localhost/{program}:test")
}

fn server(steps: u64) -> String {
    format!(
        "pushpull-ps --ps-hosts=ps-0:2222 --listen=0.0.0.0:2222 --insecure --optimizer=adam \
         --learning-rate=1e-3 --last-step={steps} --exit-when-done --state-dir=/state/ps"
    )
}

fn worker(index: u32, steps: u64) -> String {
    format!(
        "digits --ps-hosts=ps-0:2222 --worker-hosts=worker-0:2222,worker-1:2222 --job-name=worker \
         --task-index={index} --steps={steps}"
    )
}

/// Creates the volume of a ps task. Returns the flags of its container.
fn volume(podman: &Podman, name: &str) -> String {
    let state = podman.path(name);
    std::fs::create_dir(&state).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&state, mode).unwrap();
    format!("--read-only --volume {}:/state", state.display())
}

/// Waits for the ends of the three containers and removes them. Returns what chief and server have said.
fn finish(podman: &Podman) -> Result<(String, String), String> {
    let finish = |task: &str| {
        podman.finish(task).map_err(|fault| format!("{fault}\n{}", podman.said("ps-0")))
    };
    let chief = finish("worker-0")?;
    finish("worker-1")?;
    let served = finish("ps-0")?;
    podman.run("rm ps-0 worker-0 worker-1")?;
    Ok((chief, served))
}

/// Trains with a ps task and two workers, which find it by the name of its container.
fn train(podman: &Podman) -> Outcome {
    const STEPS: u64 = 2000;
    podman.start("ps-0", &volume(podman, "state"), &server(STEPS))?;
    for index in [0, 1] {
        podman.start(&format!("worker-{index}"), "--read-only", &worker(index, STEPS))?;
    }
    let (chief, served) = finish(podman)?;
    check_result(&chief, 1, 2, STEPS).map_err(|fault| format!("{fault}\n{served}"))
}

/// Kills the container of a ps task after the first steps. Started again, it goes on with its state.
///
/// Its addresses are fixed. With another MAC address it would not be reached until the entry in the ARP
/// caches of its neighbours has expired, which takes longer than the server waits for its workers.
fn train_with_kill(podman: &Podman) -> Outcome {
    // Some seconds, so that the training goes on when its server is killed.
    const STEPS: u64 = 20_000;
    let flags = format!("{} --ip {ADDRESS} --mac-address {MAC}", volume(podman, "killed"));
    podman.start("ps-0", &flags, &server(STEPS))?;
    let flags = format!("--read-only --add-host ps-0:{ADDRESS}");
    for index in [0, 1] {
        podman.start(&format!("worker-{index}"), &flags, &worker(index, STEPS))?;
    }
    let begin = Instant::now();
    while !podman.said("worker-0").contains(&format!("of {STEPS}, loss")) {
        if begin.elapsed() > LIMIT {
            return Err(format!("no step is made: {}", podman.said("worker-0")));
        }
    }
    podman.run("kill --signal KILL ps-0")?;
    podman.run("start ps-0")?;
    let (chief, served) = finish(podman)?;
    if served.matches("serves on").count() != 2 || !served.contains(&format!("at step {STEPS}")) {
        return Err(format!("the server was not killed during the training: {served}"));
    }
    check_result(&chief, 1, 2, STEPS).map_err(|fault| format!("{fault}\n{served}"))
}

/// A daemon serves without `/dev/shm`, and names it if its state is to be there.
fn without_shared_memory(podman: &Podman) -> Outcome {
    let line = |flags: &str| {
        let image = image("pushpull-ps");
        format!(
            "run {flags} --ipc none --read-only --read-only-tmpfs=false --network none {LIMITS} \
             {image} pushpull-ps --ps-hosts=127.0.0.1:2222"
        )
    };
    let there = line("--rm") + " --state-dir=/dev/shm/ps";
    let Err(fault) = podman.run(&there) else {
        return Err("the state is in /dev/shm".to_owned());
    };
    if !fault.contains("exit status: 2") || !fault.contains("directory /dev/shm/ps") {
        return Err(fault);
    }
    podman.run(&line("--detach --name ps-alone"))?;
    podman.run("stop --time 30 ps-alone")?;
    let served = podman.finish("ps-alone")?;
    match served.contains("serves on") {
        true => Ok(fault.lines().last().unwrap_or_default().to_owned()),
        false => Err(served),
    }
}
