//! Tasks that fail, start again, ignore signals or leave processes behind, and launchers that are told
//! to end.

use std::process::Stdio;

use rustix::process::Signal;

use super::{Running, is_alive, launch, run, wait_for_ends};
use crate::test_process::{LONG, ignores_hangup};

/// Two daemons as ps tasks and three as workers, which serve functions until they are told to end.
fn five_daemons(more: &[&str]) -> Running {
    let line = ["--num-ps=2", "--num-workers=3"];
    let line = [&line[..], more, &["--", env!("CARGO_BIN_EXE_pushpull-ps")]].concat();
    let running = Running::start(&mut launch(&line), 5, "serves on");
    assert_eq!(running.pids.len(), 5);
    running
}

#[test]
fn a_signal_ends_all_tasks_in_order_and_leaves_nobody() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        if signal == Signal::HUP && ignores_hangup() {
            println!("SKIPPED: no launcher is ended by a hangup, nohup has started this test");
            continue;
        }
        let running = five_daemons(&[]);
        let pids = running.pids.clone();
        let (ended, output, errors) = running.end(signal);
        assert_eq!(ended, Some(code), "{output}\n{errors}");
        assert_eq!(output.matches(" is done").count(), 5, "{output}\n{errors}");
        assert_eq!(pids.iter().filter(|pid| is_alive(**pid)).count(), 0);
    }
}

#[test]
fn a_launcher_that_is_killed_leaves_nobody() {
    let running = five_daemons(&[]);
    let pids = running.pids.clone();
    let (code, _, _) = running.end(Signal::KILL);
    assert_eq!(code, None);
    wait_for_ends(&pids);
}

#[test]
fn tasks_end_in_order_with_a_killed_launcher_if_they_ask_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let arguments = format!("--exit-with-parent --unix-socket {}", socket.display());
    let mut command = launch(&["--num-workers=0", "--ps-args", &arguments]);
    let running = Running::start(&mut command, 1, "serves on");
    let pids = running.pids.clone();
    assert!(socket.exists());
    running.end(Signal::KILL);
    wait_for_ends(&pids);
    assert!(!socket.exists(), "a server that ends in order removes its socket");
}

#[test]
fn a_failed_task_starts_again_as_often_as_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let marks = folder.path().join("marks");
    // Fails twice, by a signal and by an exit code.
    let script = format!(
        "echo x >> {0}; case $(wc -l < {0}) in 1) kill -9 $$;; 2) exit 3;; *) echo at last;; esac",
        marks.display()
    );
    let script = format!("case $0 in ps) sleep 600;; esac; {script}");
    let line = ["--no-flags", "--restart=2", "--grace=0", "--", "sh", "-c", &script, "{job}"];
    let (code, output, errors) = run(&line);
    assert_eq!(code, 0, "{output}\n{errors}");
    assert!(output.contains("task=worker:0 incarnation=2 at last\n"), "{output}");
    let first = "/job:worker/task:0 was ended by signal 9: restart 1 of 2 in 250 ms\n";
    let second = "/job:worker/task:0 ended with exit code 3: restart 2 of 2 in 500 ms\n";
    assert!(errors.contains(first) && errors.contains(second), "{errors}");
    assert_eq!(output.matches("started /job:worker/task:0 pid").count(), 3, "{output}");

    std::fs::remove_file(&marks).unwrap();
    let line = ["--no-flags", "--restart=1", "--", "sh", "-c", &script, "{job}"];
    let (code, output, errors) = run(&line);
    assert_eq!(code, 3, "{output}\n{errors}");
    assert!(errors.contains("exit code 3: all others are ended\n"), "{errors}");
}

#[test]
fn the_first_failure_ends_all_others_and_is_the_exit_code() {
    let script = "echo $$; case $0 in worker-1) kill -SEGV $$;; *) exec sleep 600;; esac";
    let line = ["--num-workers=3", "--no-flags", "--", "sh", "-c", script, "{job}-{index}"];
    let (code, output, errors) = run(&line);
    assert_eq!(code, 139, "{output}\n{errors}");
    let line = "/job:worker/task:1 was ended by signal 11: all others are ended\n";
    assert!(errors.contains(line), "{errors}");
    assert_eq!(errors.matches("was ended by signal 15").count(), 3, "{errors}");
    let pids = output.lines().filter_map(|line| line.split(' ').nth(2)?.parse().ok());
    let pids: Vec<u32> = pids.collect();
    assert!(!pids.iter().any(|pid| is_alive(*pid)), "{output}");
}

#[test]
fn a_task_that_ignores_the_end_is_killed_by_name() {
    let script = "trap '' TERM; echo here; while :; do sleep 600; done";
    let line = ["--no-flags", "--kill-after=1", "--", "sh", "-c", script];
    let running = Running::start(&mut launch(&line), 2, "here");
    let pids = running.pids.clone();
    let (code, output, errors) = running.end(Signal::TERM);
    assert_eq!(code, Some(143), "{output}\n{errors}");
    for job in ["ps", "worker"] {
        let line = format!("/job:{job}/task:0 has not ended 1 s after SIGTERM: it is killed\n");
        assert!(errors.contains(&line), "{errors}");
    }
    assert!(!pids.iter().any(|pid| is_alive(*pid)));
}

#[test]
fn a_second_signal_kills() {
    let script = "trap '' TERM; echo here; while :; do sleep 600; done";
    let line = ["--no-flags", "--kill-after=86400", "--", "sh", "-c", script];
    let mut running = Running::start(&mut launch(&line), 2, "here");
    running.launcher.signal(Signal::INT);
    // The launcher says that it has understood, so that the two signals do not become one.
    let errors = running.launcher.child.stderr.take().unwrap();
    let mut errors = std::io::BufRead::lines(std::io::BufReader::new(errors));
    errors.find(|line| line.as_ref().unwrap().contains("signal 2: all tasks are ended"));
    let (code, output, _) = running.end(Signal::INT);
    assert_eq!(code, Some(130), "{output}");
}

#[test]
fn what_a_task_leaves_behind_ends_with_it() {
    let script = "sleep 600 & echo left $!; exit 0";
    let line = ["--num-workers=1", "--no-flags", "--grace=100", "--", "sh", "-c", script];
    let start = std::time::Instant::now();
    let (code, output, errors) = run(&line);
    assert!(start.elapsed() < LONG, "it has waited for what was left");
    assert_eq!(code, 0, "{output}\n{errors}");
    let left = output.lines().filter_map(|line| line.rsplit_once(" left ")?.1.parse().ok());
    let left: Vec<u32> = left.collect();
    assert_eq!(left.len(), 2, "{output}");
    wait_for_ends(&left);
}

#[test]
fn programs_that_cannot_run_are_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(&text, "").unwrap();
    let text = text.to_str().unwrap();
    let folder = folder.path().to_str().unwrap();
    for (program, fault) in [
        ("no-such-program", "there is no such program in PATH"),
        ("./no-such-program", "there is no such file"),
        (text, "it is not executable"),
        (folder, "it is no file"),
    ] {
        let (code, output, errors) = run(&["--", program]);
        assert_eq!((code, &*output), (1, ""), "{errors}");
        assert_eq!(errors, format!("pushpull: cannot run {program}: {fault}\n"));
    }
    // A file that the system cannot execute is found to be so by the task.
    let script = std::path::Path::new(folder).join("script");
    std::fs::write(&script, "#!/no/such/shell\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(&script, mode).unwrap();
    let script = script.to_str().unwrap();
    let (code, output, errors) = run(&["--", script]);
    assert_eq!(code, 127, "{output}\n{errors}");
    assert!(errors.contains(&format!("cannot run {script}: No such file")), "{errors}");
}

#[test]
fn a_port_that_is_taken_is_refused_by_its_number() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let (code, output, errors) = run(&["--base-port", &port.to_string(), "--num-workers=0"]);
    assert_eq!((code, &*output), (1, ""), "{errors}");
    let begin = format!("pushpull: --base-port {port}: port {port}: ");
    assert!(errors.starts_with(&begin), "{errors}");
}

/// The launcher is itself started by something that is killed.
#[test]
fn a_launcher_ends_with_its_parent() {
    let tool = env!("CARGO_BIN_EXE_pushpull");
    let line = [tool, "launch", "--num-workers=0", "--exit-with-parent"];
    let mut parent = crate::parent_process::ParentProcess::start(&line);
    while !parent.line().contains("serves on") {}
    parent.kill();
    let rest = parent.rest();
    assert!(rest.contains("task 0 is done"), "{rest}");
    assert!(rest.contains("signal 15: all tasks are ended"), "{rest}");
}

#[test]
fn a_launch_without_readers_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    let script = format!("for i in 1 2 3 4; do echo $i; done; echo > {}-$0", done.display());
    let line = ["--no-flags", "--grace=100", "--", "sh", "-c", &script, "{job}"];
    for output in crate::test_process::unwritable() {
        let mut command = launch(&line);
        command.stdout(output).stderr(Stdio::piped());
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        // The cluster could not be printed, so nothing has been started, as for other tools.
        assert!(!folder.path().join("done-ps").exists(), "{errors}");
    }
    // The reader leaves once it has the cluster.
    let mut command = launch(&line);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = Running::start(&mut command, 1, "started /job:ps/task:0");
    let Running { mut launcher, output, .. } = running;
    drop(output);
    let (status, _, errors) = launcher.finish();
    assert!(status.success(), "{errors}");
    let is_done = |job: &str| folder.path().join(format!("done-{job}")).exists();
    assert!(is_done("ps") && is_done("worker"), "{errors}");
}
