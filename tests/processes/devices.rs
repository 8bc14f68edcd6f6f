//! `pushpull devices`.

use std::process::Command;

use pushpull::compute::devices;
use serde_json::Value;

fn run(arguments: &[&str]) -> String {
    let tool = env!("CARGO_BIN_EXE_pushpull");
    let output = Command::new(tool).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_devices_are_those_of_the_library() {
    let found: Value = serde_json::from_str(&run(&["devices", "--json"])).unwrap();
    let found = found.as_array().unwrap();
    let expected = devices();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found["name"], expected.name);
        assert_eq!(found["model"], expected.model);
        assert_eq!(found["cores"], expected.cores);
        assert_eq!(found["memory_bytes"].as_u64(), expected.memory_bytes);
    }
    let lines = run(&["devices"]);
    assert_eq!(lines.lines().count(), expected.len());
    assert!(lines.starts_with("cpu ") && lines.contains("core"), "{lines}");
}

#[test]
fn cores_are_those_of_the_affinity() {
    let tool = env!("CARGO_BIN_EXE_pushpull");
    let pinned = Command::new("taskset").args(["-c", "0", tool, "devices"]).output();
    let Some(output) = pinned.ok().filter(|output| output.status.success()) else {
        return println!("SKIPPED: no process is pinned to the first core");
    };
    let lines = String::from_utf8(output.stdout).unwrap();
    assert!(lines.contains(" 1 core "), "{lines}");
}
