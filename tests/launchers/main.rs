//! The example `ring` under each launcher of this machine, as four ranks on this host and as sixteen
//! on four hosts: the same accuracy as one process on the joined batch. And a server with three
//! workers that find each other by the launcher's variables, or at a rendezvous on four hosts, whose
//! pushes are all applied: also where tasks or the job are killed, the server moves, or a worker is
//! stopped and replaced. No rank with
//! `--exit-with-parent` outlives a launcher that is killed.
//!
//! The hosts are network namespaces, which need root.
//! Launchers are searched for in the folders that `PUSHPULL_MPI5` and `PUSHPULL_MPICH` name, in the
//! virtual environments `target/openmpi` and `target/mpich` (`.ci/run` makes them), and in `PATH`.
//! The output names each launcher that is absent.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/case_counts.rs"]
mod case_counts;
mod cluster;
mod fenced;
#[path = "../support/hosts.rs"]
mod hosts;
mod kills;
mod marked_job;
mod moved;
mod orphans;
#[path = "../../examples/ring.rs"]
#[allow(dead_code, reason = "the example has a main of its own")]
mod ring;
mod slurm;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

use self::case_counts::CaseCounts;
use self::hosts::Hosts;
use self::kills::Victim;
use self::orphans::check_killed;
use self::slurm::SlurmCluster;

/// The first argument of a process that is a rank.
const RANK: &str = "rank";

/// What starts the ranks, and how its installation is recognized.
struct LauncherCase {
    name: &'static str,
    /// The variable that may name the folder of the program, and the folder without it.
    folder: Option<(&'static str, &'static str)>,
    program: &'static str,
    /// The command whose output names the launcher.
    probe: &'static [&'static str],
    /// A text in that output.
    sign: &'static str,
    flags: &'static str,
    /// The flags for sixteen ranks on four hosts, after the one that names the agent.
    host_flags: Option<(&'static str, &'static str)>,
}

const LAUNCHERS: [LauncherCase; 3] = [
    LauncherCase {
        name: "Open MPI 4",
        folder: None,
        program: "mpirun",
        probe: &["mpirun", "--version"],
        sign: "(Open MPI) 4.",
        flags: "--allow-run-as-root -np 4 -H localhost:4 -bind-to none -map-by slot \
                -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH -mca pml ob1 -mca btl ^openib",
        host_flags: Some((
            "-mca plm_rsh_agent",
            "--allow-run-as-root -bind-to none -mca oob_tcp_if_include eth0 -np 16 \
             -H 10.77.0.1:4,10.77.0.2:4,10.77.0.3:4,10.77.0.4:4 \
             -x PUSHPULL_RENDEZVOUS=10.77.0.1:29500",
        )),
    },
    LauncherCase {
        name: "Open MPI 5",
        folder: Some(("PUSHPULL_MPI5", "target/openmpi/bin")),
        program: "mpirun",
        probe: &["mpirun", "--version"],
        sign: "(Open MPI) 5.",
        flags: "--allow-run-as-root -np 4 -H localhost:4 --bind-to none --map-by slot \
                -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH --mca pml ob1 --mca btl ^openib",
        host_flags: Some((
            "--prtemca plm_ssh_agent",
            "--allow-run-as-root --bind-to none --prtemca prte_if_include eth0 -np 16 \
             -H 10.77.0.1:4,10.77.0.2:4,10.77.0.3:4,10.77.0.4:4 \
             -x PUSHPULL_RENDEZVOUS=10.77.0.1:29500",
        )),
    },
    LauncherCase {
        name: "MPICH",
        folder: Some(("PUSHPULL_MPICH", "target/mpich/bin")),
        program: "mpiexec",
        probe: &["mpiexec", "--version"],
        sign: "HYDRA",
        flags: "-n 4",
        host_flags: Some((
            "-launcher ssh -launcher-exec",
            "-iface eth0 -n 16 -ppn 4 -hosts 10.77.0.1,10.77.0.2,10.77.0.3,10.77.0.4 \
             -genv PUSHPULL_RENDEZVOUS 10.77.0.1:29500",
        )),
    },
];

impl LauncherCase {
    /// Returns the folder of the program, if this machine has it.
    fn find(&self) -> Option<PathBuf> {
        let own = self.folder.map(|(variable, made)| {
            let made = || Path::new(env!("CARGO_MANIFEST_DIR")).join(made);
            std::env::var_os(variable).map_or_else(made, PathBuf::from)
        });
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders = own.into_iter().chain(std::env::split_paths(&path));
        folders.find(|folder| self.is_in(folder))
    }

    fn is_in(&self, folder: &Path) -> bool {
        let [program, flags @ ..] = self.probe else { return false };
        if !folder.join(program).is_file() || !folder.join(self.program).is_file() {
            return false;
        }
        let output = limited("10", folder, program).args(flags).output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains(self.sign)
    }
}

/// Returns a command that is ended after some seconds. The program is in this folder.
fn limited(seconds: &str, folder: &Path, program: &str) -> Command {
    let mut command = in_folder(folder, "timeout");
    command.args(["-k", "5", seconds, program]);
    command
}

/// Returns a command that starts programs of this folder by their names: Open MPI takes a program with
/// a path for an installation on all hosts.
fn in_folder(folder: &Path, program: &str) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [folder.to_owned()].into_iter().chain(std::env::split_paths(&path));
    let mut command = Command::new(program);
    command.env("PATH", std::env::join_paths(folders).unwrap()).stdin(Stdio::null());
    command
}

/// Runs a command whose ranks print. Returns the result of rank 0 and the errors.
fn run(mut command: Command) -> Result<(Value, String), String> {
    let folder = tempfile::tempdir().unwrap();
    // A rank that outlives its launcher would keep a pipe open.
    let output = folder.path().join("output");
    let errors = folder.path().join("errors");
    command.stdout(File::create(&output).unwrap()).stderr(File::create(&errors).unwrap());
    let status = command.status().unwrap();
    let read = |file| String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned();
    let output = read(output);
    let errors = read(errors);
    let last = output.lines().last().unwrap_or_default();
    match serde_json::from_str(last) {
        Ok(result) if status.success() => Ok((result, errors)),
        _ => Err(format!("{command:?} ended with {status}\n{output}\n{errors}")),
    }
}

/// The results of one process on the joined batches of four and of sixteen ranks.
struct Alone {
    four: Value,
    sixteen: Value,
}

/// Checks the result of four ranks against that of one process.
fn check(case: &LauncherCase, folder: &Path, alone: &Value) -> Result<Value, String> {
    let mut command = limited("60", folder, case.program);
    command.args(case.flags.split_ascii_whitespace());
    command.arg(std::env::current_exe().unwrap()).arg(RANK);
    let (result, errors) = run(command)?;
    compare(4, &result, &errors, alone)
}

/// The steps of a training that nobody kills.
const STEPS: u64 = 300;

/// Checks a server and three workers: two programs of one job.
fn check_cluster(case: &LauncherCase, folder: &Path) -> Result<Value, String> {
    let server = cluster::server(STEPS, &cluster::BY_LAUNCHER);
    let command = programs_of_one_job(case, folder, &server, &cluster::worker_command(&[]));
    cluster::check(command, "mpi", STEPS)
}

/// Checks a server and three workers of which one is killed, which ends all, and which are started
/// again.
fn check_kills(case: &LauncherCase, folder: &Path) -> Result<Value, String> {
    let victims = [Victim::Worker, Victim::Server];
    kills::check("mpi", &victims, |server, worker| {
        programs_of_one_job(case, folder, server, worker)
    })
}

/// Returns the command that starts a server and three workers as the ranks of one job.
fn programs_of_one_job(
    case: &LauncherCase,
    folder: &Path,
    server: &[String],
    worker: &[String],
) -> Command {
    let mut command = limited("60", folder, case.program);
    let place = case.flags.split_ascii_whitespace().collect::<Vec<_>>();
    // The number of ranks belongs to each program.
    let number = place.iter().position(|&flag| flag == "-np" || flag == "-n").unwrap_or(0);
    let (before, after) = (&place[..number], place.get(number + 2..).unwrap_or_default());
    command.args(before).args(after).args(["-n", "1"]).args(server);
    command.arg(":").args(["-n", "3"]).args(worker);
    command
}

/// Checks four ranks in a step of Slurm.
fn check_step(slurm: &SlurmCluster, alone: &Value) -> Result<Value, String> {
    let mut command = slurm.srun("60");
    command.args(["-n", "4"]).arg(std::env::current_exe().unwrap()).arg(RANK);
    let (result, errors) = run(command)?;
    compare(4, &result, &errors, alone)
}

/// The name of the job that is a list of programs.
const LIST_JOB: &str = "programs";

/// Checks a server and three workers on the nodes of Slurm, which addresses of the nodes join.
fn check_program_list(slurm: &SlurmCluster) -> Result<Value, String> {
    let server = cluster::server(STEPS, &cluster::BY_LAUNCHER);
    let command = program_list(slurm, &server, &cluster::worker_command(&[]));
    cluster::check(command, "slurm", STEPS)
}

/// Checks a server and three workers that read the same job file, the workers as programs that embed
/// it.
fn check_job_file(slurm: &SlurmCluster) -> Result<Value, String> {
    let job = slurm.folder().join("job.toml");
    let text = format!(
        "[cluster]\nresolve = \"slurm\"\nnum_ps = 1\nnum_workers = 3\n\
         [optimizer]\nlearning_rate = 1\n\
         [training]\nlast_step = {STEPS}\nexit_when_done = true\n[functions]\nno_functions = true\n"
    );
    std::fs::write(&job, text).unwrap();
    let job = job.to_str().unwrap();
    let server = [cluster::SERVER, "--job", job].map(str::to_owned);
    let command = program_list(slurm, &server, &cluster::worker_command(&["--job", job]));
    cluster::check(command, "slurm", STEPS)
}

/// Checks a server and three workers that are killed, alone and by `scancel`, and started again.
fn check_cancelled(slurm: &SlurmCluster) -> Result<Value, String> {
    let cancel = || slurm.scancel(LIST_JOB);
    let victims = [Victim::Worker, Victim::Server, Victim::Job(&cancel)];
    kills::check("slurm", &victims, |server, worker| program_list(slurm, server, worker))
}

/// Returns the command that starts a server and three workers on the nodes of Slurm.
fn program_list(slurm: &SlurmCluster, server: &[String], worker: &[String]) -> Command {
    let list = slurm.folder().join("programs");
    let lines = format!("0 {}\n1-3 {}\n", server.join(" "), worker.join(" "));
    std::fs::write(&list, lines).unwrap();
    let mut command = slurm.srun("60");
    command.args(["-N", "4", "-n", "4", "--job-name", LIST_JOB, "--multi-prog"]).arg(&list);
    command
}

/// Checks the result of sixteen ranks on four hosts against that of one process.
fn check_hosts(
    case: &LauncherCase,
    (agent, flags): (&str, &str),
    folder: &Path,
    hosts: &Hosts,
    alone: &Value,
) -> Result<Value, String> {
    let mut command = limited("120", folder, "env");
    command.arg(hosts.agent()).arg("10.77.0.1").arg(folder.join(case.program));
    command.args(agent.split_ascii_whitespace()).arg(hosts.agent());
    command.args(flags.split_ascii_whitespace());
    command.arg(std::env::current_exe().unwrap()).arg(RANK);
    let (result, errors) = run(command)?;
    for number in 1..=4 {
        let line = format!("on host{number} over TCP");
        if !errors.contains(&line) {
            return Err(format!("no line of {line:?}:\n{errors}"));
        }
    }
    compare(16, &result, &errors, alone)
}

/// Checks a server and three workers, each on a host of its own, that meet at a rendezvous.
fn check_cluster_on_hosts(
    case: &LauncherCase,
    (agent, flags): (&str, &str),
    folder: &Path,
    hosts: &Hosts,
) -> Result<Value, String> {
    const RENDEZVOUS: &str = "10.77.0.1:29501";
    let mut command = limited("60", folder, "env");
    command.arg(hosts.agent()).arg("10.77.0.1").arg(folder.join(case.program));
    command.args(agent.split_ascii_whitespace()).arg(hosts.agent());
    // One slot on each host, and the number of ranks belongs to each program.
    let flags = flags.replace(":4", ":1").replace("-ppn 4", "-ppn 1");
    let flags = flags.replace("-np 16", "").replace("-n 16", "");
    command.args(flags.split_ascii_whitespace()).args(["-n", "1"]);
    let meet = ["--rendezvous", RENDEZVOUS];
    let serve = [&cluster::BY_LAUNCHER[..], &meet, &["--insecure"]].concat();
    command.args(cluster::server(STEPS, &serve));
    command.arg(":").args(["-n", "3"]).args(cluster::worker_command(&meet));
    cluster::check(command, "mpi", STEPS)
}

/// Checks that each rank has said its place, and that the accuracy is that of one process.
fn compare(ranks: u32, result: &Value, errors: &str, alone: &Value) -> Result<Value, String> {
    for number in 0..ranks {
        let line = format!("rank {number} of {ranks} on ");
        if !errors.contains(&line) {
            return Err(format!("no line of {line:?}:\n{errors}"));
        }
    }
    match result["ranks"] == ranks && result["accuracy"] == alone["accuracy"] {
        true => Ok(result.clone()),
        false => Err(format!("{result}, and alone {alone}")),
    }
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some(RANK) => return ring::run(arguments.drain(1..)),
        Some(cluster::WORKER) => return cluster::worker(&arguments),
        _ => {}
    }
    let mut names = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    let is_wanted = names.peek().is_none() || names.any(|name| "launchers".contains(&name[..]));
    if !is_wanted || arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }

    let alone = |batch: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([RANK, "--batch", batch]);
        run(command).unwrap().0
    };
    let alone = Alone { four: alone("256"), sixteen: alone("1024") };
    println!("alone: {}, {}", alone.four, alone.sixteen);
    let hosts = Hosts::new("ring");
    let mut counts = CaseCounts::default();
    for case in LAUNCHERS {
        let name = case.name;
        let Some(folder) = case.find() else {
            counts.skip(name, "does not run on this machine");
            continue;
        };
        counts.count(name, check(&case, &folder, &alone.four));
        counts.count(&format!("{name}, a server"), check_cluster(&case, &folder));
        counts.count(&format!("{name}, a rank killed"), check_kills(&case, &folder));
        counts.count(&format!("{name}, killed"), check_killed(&case, &folder));
        let Some(flags) = case.host_flags else { continue };
        let name = format!("{name} on four hosts");
        match &hosts {
            Ok(hosts) => {
                counts.count(&name, check_hosts(&case, flags, &folder, hosts, &alone.sixteen));
                let trained = check_cluster_on_hosts(&case, flags, &folder, hosts);
                counts.count(&format!("{name}, a server"), trained);
            }
            Err(error) => counts.skip(&name, &format!("needs namespaces: {error}")),
        }
    }
    match &hosts {
        Ok(hosts) => counts.count("a server at another address", moved::check(hosts)),
        Err(error) => {
            counts.skip("a server at another address", &format!("needs namespaces: {error}"));
        }
    }
    match SlurmCluster::start() {
        Ok(slurm) => {
            counts.count("Slurm", check_step(&slurm, &alone.four));
            counts.count("Slurm, a server", check_program_list(&slurm));
            counts.count("Slurm, a job file", check_job_file(&slurm));
            counts.count("Slurm, a task killed, a job cancelled", check_cancelled(&slurm));
            counts.count("Slurm, a worker stopped", fenced::check(&slurm));
        }
        Err(reason) => counts.skip("Slurm", &reason),
    }
    counts.finish("launchers")
}
