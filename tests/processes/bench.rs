//! `pushpull bench`: its rows, its plot, and its failure when values differ from the sum of the
//! pushes. The figures of these short runs mean nothing.

use std::process::{Command, Output};

use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, TaskId};
use serde_json::Value;

/// Starts a server with learning rate `rate`, and returns it with its address.
fn serve(runtime: &tokio::runtime::Runtime, rate: f64) -> (Ps, String) {
    let listener = runtime.block_on(Ps::listen("127.0.0.1:0")).unwrap();
    let address = listener.address().to_owned();
    let cluster = ClusterSpec::builder().job("ps", [&address]).job("worker", ["127.0.0.1:1"]);
    let config = PsConfig::new(cluster.build().unwrap(), TaskId::ps(0), Sgd::new(rate)).shards(2);
    (listener.start(config).unwrap(), address)
}

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull"));
    command.arg("bench").args(arguments);
    if !arguments.contains(&"--rounds") {
        command.args(["--rounds", "5", "--round-ms", "1"]);
    }
    command.output().unwrap()
}

/// Parses the rows that a successful run has printed.
fn rows(output: &Output) -> Vec<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let lines = std::str::from_utf8(&output.stdout).unwrap().lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the standard error of a failed run.
fn failure(output: &Output) -> String {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_running_server_is_measured_repeatedly_and_its_values_are_checked() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (_server, address) = serve(&runtime, 0.25);
    let common = ["--json", "--address", &address, "--sizes", "4KiB", "--variables", "3"];
    for _ in 0..2 {
        let rows = rows(&bench(&[&common[..], &["--learning-rate", "0.25"]].concat()));
        let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["pull_tcp_4KiB_variables3", "push_tcp_4KiB_variables3"]);
        for row in rows {
            let figure = |name: &str| row[name].as_f64().unwrap();
            assert!(figure("ours") > 0.0 && figure("ceiling") > 0.0, "{row}");
            assert!((figure("ratio") - figure("ours") / figure("ceiling")).abs() < 0.1, "{row}");
            assert_eq!((&row["unit"], figure("n")), (&Value::from("GB/s"), 5.0), "{row}");
        }
    }
    // The default learning rate differs from the server's.
    let error = failure(&bench(&common));
    assert!(error.contains("the elements are "), "{error}");
    let error = failure(&bench(&["--address", &address, "--sizes", "64B,4KiB"]));
    assert!(error.contains("say one of --sizes"), "{error}");
    // The server has three variables, not one.
    failure(&bench(&["--address", &address, "--sizes", "4KiB"]));
}

#[test]
fn several_replicas_variables_and_shards_are_measured_and_plotted() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("plot.svg");
    let arguments = ["--json", "--transport", "uds,shm", "--sizes", "4KiB,64KiB", "--plot"];
    let more = ["--variables", "5", "--replicas", "3", "--shards", "2"];
    let rows = rows(&bench(&[&arguments[..], &[picture.to_str().unwrap()], &more].concat()));
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    let of = |row: &str| format!("{row}_variables5_replicas3_shards2");
    let uds = ["pull_uds_4KiB", "push_uds_4KiB", "pull_uds_64KiB", "push_uds_64KiB"];
    let verbs = ["pull", "push", "push_copied"];
    let shm = ["4KiB", "64KiB"].map(|size| verbs.map(|verb| format!("{verb}_shm_{size}")));
    let expected: Vec<&str> =
        uds.into_iter().chain(shm.as_flattened().iter().map(|s| &**s)).collect();
    assert_eq!(names, expected.into_iter().map(of).collect::<Vec<_>>());
    let picture = std::fs::read_to_string(picture).unwrap();
    assert!(picture.contains("pull_uds_variables5_replicas3_shards2"), "{picture}");
}

#[test]
fn the_handover_of_a_shared_gradient_is_measured_beside_pushes() {
    let rows = rows(&bench(&["--json", "--transport", "shm", "--sizes", "64KiB"]));
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    let expected = ["pull", "push", "handed", "push_copied"].map(|row| format!("{row}_shm_64KiB"));
    assert_eq!(names, expected);
}

#[test]
fn invalid_arguments_are_refused() {
    for (arguments, reason) in [
        (&["--rounds", "4"][..], "4 is not in 5..=1000"),
        (&["--sizes", "64x"], "\"x\" is no unit of bytes"),
        (&["--sizes", "64B", "--variables", "17"], "--variables 17: 64 bytes have fewer elements"),
        (&["--learning-rate", "1"], "--address"),
    ] {
        let error = failure(&bench(arguments));
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}
