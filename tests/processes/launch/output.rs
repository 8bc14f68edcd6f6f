//! The lines of tasks on the terminal and in log files.

use std::fs;
use std::path::Path;

use super::{launch, run};

/// Runs a script as one ps task and two workers, with log files in a directory. All end by themselves. All end by themselves.
fn logged(directory: &Path, script: &str) -> (i32, String, String) {
    let logs = directory.to_str().unwrap();
    let line = ["--num-workers=2", "--no-flags", "--grace=100", "--logs", logs];
    run(&[&line[..], &["--", "sh", "-c", script, "{job}:{index}"]].concat())
}

#[test]
fn each_task_has_a_log_file_and_merged_ones_can_be_searched() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("new/logs");
    let script = "echo \"$0 one\"; echo \"$0 two\" >&2";
    for run in 1..=2 {
        let (code, output, errors) = logged(&logs, script);
        assert_eq!(code, 0, "{output}\n{errors}");
        for task in ["ps:0", "worker:0", "worker:1"] {
            let [one, two] =
                ["one", "two"].map(|word| format!("task={task} incarnation=0 {task} {word}\n"));
            assert!(output.contains(&one), "{output}");
            assert!(errors.contains(&two), "{errors}");
            let file = fs::read_to_string(logs.join(format!("{}.log", task.replace(':', "-"))));
            let file = file.unwrap();
            assert_eq!((file.matches(&one).count(), file.matches(&two).count()), (run, run));
            assert_eq!(file.lines().count(), 2 * run, "{file}");
        }
    }
    let files = fs::read_dir(&logs).unwrap().map(|file| fs::read_to_string(file.unwrap().path()));
    let merged: String = files.map(Result::unwrap).collect();
    let found = merged.lines().filter(|line| line.contains("task=worker:1 ")).count();
    assert_eq!(found, 4, "{merged}");
}

#[test]
fn bytes_that_are_no_text_and_lines_without_end_pass_through() {
    let folder = tempfile::tempdir().unwrap();
    // 300,000 bytes without a line break, then bytes that are no UTF-8.
    let script =
        "case $0 in worker:1) head -c 300000 /dev/zero | tr '\\0' x; printf '\\377\\n\\000';; esac";
    let (code, _, errors) = logged(folder.path(), script);
    assert_eq!(code, 0, "{errors}");
    let file = fs::read(folder.path().join("worker-1.log")).unwrap();
    let lines: Vec<&[u8]> = file.split(|byte| *byte == b'\n').collect();
    let prefix = b"task=worker:1 incarnation=0 ";
    let texts: Vec<&[u8]> =
        lines.iter().filter_map(|line| line.strip_prefix(&prefix[..])).collect();
    let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
    assert_eq!(lengths, [65536, 65536, 65536, 65536, 300_001 - 4 * 65536, 1]);
    assert!(texts[4].ends_with(b"x\xff"));
    assert_eq!(texts[5], b"\0");
}

#[test]
fn a_log_file_that_cannot_be_written_is_told_once_and_the_tasks_go_on() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.path().join("worker-0.log")).unwrap();
    let script = "for i in 1 2 3; do echo $i; sleep 0.1; done";
    let (code, output, errors) = logged(folder.path(), script);
    assert_eq!(code, 0, "{errors}");
    assert_eq!(errors.matches("nothing more is logged in ").count(), 1, "{errors}");
    assert!(errors.contains("worker-0.log: No space left on device"), "{errors}");
    assert!(output.contains("task=worker:0 incarnation=0 3\n"), "{output}");
    let other = fs::read_to_string(folder.path().join("worker-1.log")).unwrap();
    assert_eq!(other.lines().count(), 3);

    let (code, output, errors) = logged(Path::new("/dev/null"), script);
    assert_eq!(code, 1, "{output}");
    assert!(errors.starts_with("pushpull: --logs /dev/null: "), "{errors}");
    assert!(!output.contains("started"), "{output}");
}

/// The launcher's output is a pipe that holds less than what the tasks write.
#[test]
fn a_slow_reader_loses_no_line() {
    let line = ["--num-ps=2", "--num-workers=2", "--no-flags", "--grace=100"];
    let script = "seq 1 20000";
    let mut command = launch(&[&line[..], &["--", "sh", "-c", script]].concat());
    let (reader, writer) = std::io::pipe().unwrap();
    command.stdout(writer).stderr(std::process::Stdio::null());
    let mut launcher = command.spawn().unwrap();
    drop(command);
    // The tasks have filled the pipe, and wait, when the first one is read from.
    let mut output = String::new();
    std::io::Read::read_to_string(&mut { reader }, &mut output).unwrap();
    assert!(launcher.wait().unwrap().success());
    for task in ["ps:0", "ps:1", "worker:0", "worker:1"] {
        let prefix = format!("task={task} incarnation=0 ");
        let lines = output.lines().filter_map(|line| line.strip_prefix(&prefix));
        let numbers: Vec<u32> = lines.map(|line| line.parse().unwrap()).collect();
        assert!(numbers.iter().copied().eq(1..=20_000), "{task}: {} lines", numbers.len());
    }
}

/// A folder with these programs of the system, and nothing else, for a `PATH`.
fn programs(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let path = ["/usr/bin", "/bin"].map(|bin| Path::new(bin).join(name));
        let path = path.into_iter().find(|path| path.exists()).expect("the program is there");
        std::os::unix::fs::symlink(path, folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn tensorboard_is_started_with_the_tasks_if_it_is_there() {
    let path = programs(&["sh", "sleep"]);
    let launched = || {
        let line = ["--no-flags", "--tensorboard", "some/summaries", "--", "sh", "-c", "sleep 1"];
        let output = launch(&line).env("PATH", path.path()).output().unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, output, errors) = launched();
    assert_eq!(code, Some(0), "{output}\n{errors}");
    let absent = "pushpull: --tensorboard: cannot run tensorboard: there is no such program in PATH: \
                  the tasks run without\n";
    assert!(errors.starts_with(absent), "{errors}");

    // One that says how it was started, and serves until it is told to end.
    let program = path.path().join("tensorboard");
    fs::write(&program, "#!/bin/sh\necho \"$@\"; exec sleep 600\n").unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let (code, output, errors) = launched();
    assert_eq!(code, Some(0), "{output}\n{errors}");
    let address = output.lines().find_map(|line| line.strip_prefix("TensorBoard on http://"));
    let (address, directory) = address.unwrap().split_once("/ shows ").unwrap();
    let port = address.strip_prefix("127.0.0.1:").unwrap();
    assert_eq!(directory, "some/summaries");
    let started = format!(
        "task=tensorboard incarnation=0 --logdir some/summaries --host 127.0.0.1 --port {port}\n"
    );
    assert!(output.contains(&started), "{output}");
    assert!(errors.contains("tensorboard was ended by signal 15\n"), "{errors}");

    // The tasks go on without it when it fails.
    fs::write(&program, "#!/bin/sh\nexit 3\n").unwrap();
    let (code, output, errors) = launched();
    assert_eq!(code, Some(0), "{output}\n{errors}");
    assert!(errors.contains("tensorboard ended with exit code 3: the others go on\n"), "{errors}");
}
