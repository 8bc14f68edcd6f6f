//! The programs beside a driver: the tool lists its devices, and the daemon does not touch it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use pushpull_cuda_emulator::control::link_as_driver;
use serde_json::Value;

#[test]
fn the_tool_lists_the_devices_of_the_driver() {
    let folder = tempfile::tempdir().unwrap();
    link_as_driver(folder.path()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull"));
    command.env("LD_LIBRARY_PATH", folder.path()).env("PUSHPULL_EMULATOR_DEVICES", "2");
    let output = command.args(["devices", "--json"]).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> =
        found.as_array().unwrap().iter().map(|device| device["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cpu", "cuda:0", "cuda:1"]);
    assert_eq!(found[0]["compute_capability"], Value::Null);
    assert!(found[1]["compute_capability"].as_str().unwrap().contains('.'), "{found}");
    assert!(found[2]["memory_bytes"].as_u64() > Some(0), "{found}");
}

#[test]
fn a_parameter_server_never_opens_the_driver() {
    let folder = tempfile::tempdir().unwrap();
    link_as_driver(folder.path()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.env("LD_LIBRARY_PATH", folder.path());
    let address = format!("unix:{}", folder.path().join("ps.sock").display());
    command.args(["--ps-hosts", &address, "--worker-hosts", "127.0.0.1:1"]);
    let mut daemon = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let maps = fs::read_to_string(format!("/proc/{}/maps", daemon.id())).unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(line.contains("serves on"), "{line}");
    let opened = maps.lines().any(|line| line.contains("cuda"));
    assert!(!opened && maps.contains("libc"), "{maps}");
}
