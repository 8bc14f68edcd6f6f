//! Daemons with `--exit-with-parent`, whose parent is killed.

use crate::parent_process::ParentProcess;
use crate::test_process::free_addresses;
use rustix::process::Signal;

/// Starts a daemon from a shell, kills the shell once it serves, and returns both.
fn orphan(flags: &[&str]) -> (ParentProcess, String) {
    let address = free_addresses(1).remove(0);
    let line = [&[env!("CARGO_BIN_EXE_pushpull-ps"), "--ps-hosts", &address], flags].concat();
    let mut parent = ParentProcess::start(&line);
    let said = parent.line();
    assert!(said.contains("task 0 serves on"), "{said}");
    parent.kill();
    (parent, address)
}

#[test]
fn a_daemon_ends_in_order_when_its_parent_is_killed() {
    let (parent, _) = orphan(&["--exit-with-parent"]);
    let output = parent.rest();
    assert!(output.contains("task 0 is done at step 0"), "{output}");
}

/// The reason for the flag.
#[test]
fn a_daemon_without_the_flag_outlives_its_parent() {
    let (parent, address) = orphan(&[]);
    assert!(std::net::TcpStream::connect(&address).is_ok(), "it serves no more");
    parent.signal_child(Signal::TERM);
    let output = parent.rest();
    assert!(output.contains("task 0 is done at step 0"), "{output}");
}
