//! Tasks on other hosts: by an agent that stays here, in mount namespaces that hide a directory, and in
//! network namespaces.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pushpull::{ClusterSpec, TaskId};
use rustix::process::Signal;

use super::{Running, is_alive, launch, run, run_command, wait_for_empty_groups, wait_for_ends};

#[path = "../../support/hosts.rs"]
#[allow(dead_code, reason = "the launchers use more of it")]
mod namespaces;

/// Writes a script that runs lines on hosts, as `ssh` does.
fn agent(folder: &Path, body: &str) -> PathBuf {
    let path = folder.join("agent");
    fs::write(&path, format!("#!/bin/sh\nhost=$1; shift\n{body}\n")).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
    path
}

#[test]
fn tasks_run_where_their_slots_are_in_the_same_directory() {
    let folder = tempfile::tempdir().unwrap();
    // A login shell begins elsewhere.
    let agent = agent(folder.path(), "echo \"$host\" >&2; cd /; exec sh -c \"$*\"");
    let hosts = ["--hosts=a:2,me@b:2", "--agent", agent.to_str().unwrap(), "--grace=0"];
    let script = "echo \"it's $PWD\" \"$@\"; echo \"$TF_CONFIG\"";
    let line = [&hosts[..], &["--num-ps=2", "--num-workers=2", "--", "sh", "-c", script]].concat();
    let (code, output, errors) = run(&line);
    assert_eq!(code, 0, "{output}\n{errors}");
    let flags = "--ps_hosts=a:2222,b:2222 --worker_hosts=a:2223,b:2223";
    assert_eq!(output.lines().next(), Some(flags), "{output}");
    let here = std::env::current_dir().unwrap();
    for (index, host) in (0..).zip(["a", "me@b"]) {
        assert!(
            output.contains(&format!("started /job:ps/task:{index} on {host} pid ")),
            "{output}"
        );
        let prefix = format!("task=worker:{index} incarnation=0 ");
        let lines: Vec<&str> =
            output.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let said = format!(
            "it's {} --worker_hosts=a:2223,b:2223 --job_name=worker --task_index={index}",
            here.display()
        );
        assert_eq!(lines[0], said, "{output}");
        let task = ClusterSpec::task_of_json(lines[1]).unwrap();
        assert_eq!(task, Some(TaskId::worker(index)), "{output}");
        let cluster = ClusterSpec::from_json(lines[1]).unwrap();
        assert_eq!(cluster.task_address("worker", 1), Ok("b:2223"));
        assert!(errors.contains(&format!("{prefix}{host}\n")), "{errors}");
    }
    let line = [&hosts[..], &["--num-ps=2", "--num-workers=3", "--", "sh"]].concat();
    let (code, output, errors) = run(&line);
    assert_eq!((code, &*output), (1, ""));
    assert!(
        errors.contains("--hosts: 5 tasks need as many slots, and the hosts have 4"),
        "{errors}"
    );
}

/// The shells that `sh` may be.
fn shells() -> Vec<&'static str> {
    let is_there = |shell: &&str| Command::new(shell).args(["-c", "exit"]).status().is_ok();
    ["sh", "dash", "bash"].into_iter().filter(is_there).collect()
}

#[test]
fn tasks_of_hosts_end_with_the_launch_however_it_ends() {
    for shell in shells() {
        let folder = tempfile::tempdir().unwrap();
        // The line runs `sh`: the shell of the host.
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let path =
            Command::new("sh").args(["-c", &format!("command -v {shell}")]).output().unwrap();
        let path = String::from_utf8(path.stdout).unwrap();
        std::os::unix::fs::symlink(path.trim(), bin.join("sh")).unwrap();
        let body = format!("PATH={}:$PATH; exec sh -c \"$*\"", bin.display());
        let agent = agent(folder.path(), &body);
        let start = |script: &str, kill_after: &str| {
            let line = ["--hosts=a:2", "--agent", agent.to_str().unwrap(), "--no-flags"];
            let line =
                [&line[..], &["--kill-after", kill_after, "--", "sh", "-c", script]].concat();
            Running::start(&mut launch(&line), 2, "ready")
        };
        let pids = folder.path().join("pids");
        let noted = || {
            let lines = fs::read_to_string(&pids).unwrap();
            lines.lines().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()
        };
        let own = format!("echo $$ >> {}; sleep 600 & echo $! >> {0}; echo ready", pids.display());
        let patient = format!("{own}; wait");
        let stubborn = format!("trap '' TERM; {own}; while :; do sleep 600; done");
        for (script, kill_after, signal, code) in [
            (&patient, "600", Signal::TERM, Some(143)),
            (&patient, "600", Signal::KILL, None),
            (&stubborn, "1", Signal::INT, Some(130)),
            (&stubborn, "1", Signal::KILL, None),
        ] {
            let running = start(script, kill_after);
            assert_eq!(noted().len(), 4);
            assert!(noted().iter().all(|pid| is_alive(*pid)));
            let agents = running.pids.clone();
            let (ended, output, errors) = running.end(signal);
            assert_eq!(ended, code, "{shell}: {output}\n{errors}");
            wait_for_ends(&noted());
            // Neither are the shells of the host.
            wait_for_empty_groups(&agents);
            fs::remove_file(&pids).unwrap();
        }
    }
}

#[test]
fn the_exit_code_of_a_task_on_a_host_is_that_of_the_launch() {
    let folder = tempfile::tempdir().unwrap();
    let agent = agent(folder.path(), "exec sh -c \"$*\"");
    let hosts = ["--hosts=a:2", "--agent", agent.to_str().unwrap(), "--no-flags", "--"];
    let script = "case $0 in worker) exit 7;; *) exec sleep 600;; esac";
    let (code, _, errors) = run(&[&hosts[..], &["sh", "-c", script, "{job}"]].concat());
    assert_eq!(code, 7, "{errors}");
    assert!(errors.contains("/job:worker/task:0 on a ended with exit code 7"), "{errors}");
    let (code, _, errors) = run(&[&hosts[..], &["no-such-program"]].concat());
    assert_eq!(code, 127, "{errors}");
    assert!(errors.contains("no-such-program"), "{errors}");
}

#[test]
fn a_directory_is_copied_to_hosts_that_lack_it_and_left_alone_where_it_is_shared() {
    let folder = tempfile::tempdir().unwrap();
    let copied = folder.path().join("it's copied");
    fs::create_dir(&copied).unwrap();
    fs::write(copied.join("data"), "words").unwrap();
    fs::write(copied.join("program"), "#!/bin/sh\ncat \"$1\"; echo\n").unwrap();
    fs::set_permissions(copied.join("program"), PermissionsExt::from_mode(0o700)).unwrap();
    for host in ["a", "b"] {
        fs::create_dir(folder.path().join(host)).unwrap();
    }
    // Host b shares the directory; the one of host a is its own.
    let body = format!(
        "[ \"$host\" = b ] && exec sh -c \"$*\"\n\
         exec unshare -m sh -c \"mount --bind '{0}/a' \\\"{1}\\\" && {{ $*; }}\"",
        folder.path().display(),
        copied.display()
    );
    let agent = agent(folder.path(), &body);
    let try_out = Command::new(&agent).args(["a", "true"]).output().unwrap();
    if !try_out.status.success() {
        let reason = String::from_utf8_lossy(&try_out.stderr);
        println!("SKIPPED: no directory is copied, it needs mount namespaces: {}", reason.trim());
        return;
    }
    let program = copied.join("program");
    let data = copied.join("data");
    let launched = || {
        let line = ["--hosts=a,b", "--agent", agent.to_str().unwrap(), "--no-flags", "--grace=5"];
        let sync = ["--sync", copied.to_str().unwrap(), "--"];
        let program = [program.to_str().unwrap(), data.to_str().unwrap()];
        run(&[&line[..], &sync, &program].concat())
    };
    for words in ["words", "other words"] {
        fs::write(&data, words).unwrap();
        let (code, output, errors) = launched();
        assert_eq!(code, 0, "{output}\n{errors}");
        let path = copied.display();
        assert!(output.contains(&format!("copied {path} to a\n")), "{output}");
        assert!(output.contains(&format!("b has {path} already: it is shared\n")), "{output}");
        let read = fs::read_to_string(folder.path().join("a/data")).unwrap();
        assert_eq!(read, words);
        for task in ["ps:0", "worker:0"] {
            let line = format!("task={task} incarnation=0 {words}\n");
            assert!(output.contains(&line), "{output}");
        }
    }
    let names = |path: &Path| {
        let names = fs::read_dir(path).unwrap().map(|file| file.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    assert_eq!(names(&copied), ["data", "program"], "the mark is gone");
    assert_eq!(names(&folder.path().join("a")), ["data", "program"]);

    // Keys are copied, and nothing else; not to what another user may have put there.
    let keys = folder.path().join("a/keys");
    let secure = ["--hosts=a:2", "--agent", agent.to_str().unwrap(), "--no-flags", "--grace=0"];
    let own_keys = copied.join("keys");
    let secure = [&secure[..], &["--secure", own_keys.to_str().unwrap(), "--", "true"]].concat();
    let (code, output, errors) = run(&secure);
    assert_eq!(code, 0, "{output}\n{errors}");
    assert_eq!(names(&keys), ["ca.pem", "ps.key", "ps.pem", "tokens"]);
    assert_eq!(fs::read(keys.join("ps.key")).unwrap(), fs::read(own_keys.join("ps.key")).unwrap());
    assert_eq!(fs::metadata(&keys).unwrap().permissions().mode() & 0o777, 0o700);
    fs::remove_dir_all(&keys).unwrap();
    std::os::unix::fs::symlink("/tmp", &keys).unwrap();
    let (code, output, errors) = run(&secure);
    assert_eq!(code, 1, "{output}");
    assert!(errors.contains("keys is not of this user"), "{errors}");
    assert!(!output.contains("started"), "{output}");

    // A host that does not answer ends the launch before anything starts.
    fs::write(&agent, "#!/bin/sh\necho cannot resolve \"$1\" >&2; exit 255\n").unwrap();
    let (code, output, errors) = launched();
    assert_eq!(code, 1, "{output}");
    assert!(!output.contains("started"), "{output}");
    assert!(errors.contains("the agent for a ended with exit status: 255"), "{errors}");
}

/// Daemons and workers on three hosts with addresses of their own, which this machine does not reach.
#[test]
fn a_cluster_on_three_hosts_trains() {
    let hosts = match namespaces::Hosts::new("launch") {
        Ok(hosts) => hosts,
        Err(error) => {
            println!("SKIPPED: no cluster on three hosts trains, it needs namespaces: {error}");
            return;
        }
    };
    let agent = hosts.agent();
    let program = std::env::current_exe().unwrap();
    let line = ["--hosts=10.77.0.1:2,10.77.0.2:2,10.77.0.3:1", "--num-ps=2", "--num-workers=3"];
    let agent = ["--agent", agent.to_str().unwrap(), "--ps-daemon", "--no-flags"];
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    let program = ["--", program.to_str().unwrap()];
    let task = super::trains::TASK;
    let insecure = ["--ps-args", "--insecure --last-step 200"];
    let secure = ["--secure", keys.to_str().unwrap(), "--ps-args", "--last-step 200"];
    for safety in [&insecure[..], &secure] {
        let mut command = launch(&[&line[..], &agent, safety, &program, &task].concat());
        if safety.contains(&"--secure") {
            command.env(super::trains::KEYS, &keys);
        }
        let (code, output, errors) = run_command(&mut command);
        assert_eq!(code, 0, "{output}\n{errors}");
        assert_eq!(super::trains::pushed(&output, 3), 200, "{output}");
        for task in 0..2 {
            let line = format!("task=ps:{task} incarnation=0 pushpull-ps: task {task} is done");
            assert!(output.contains(&line), "{output}");
        }
    }
}
