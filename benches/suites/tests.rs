//! The rows of the suites, and their refusals. The figures of these short runs mean nothing.

use clap::Parser;

use crate::bench::report::{Report, ReportLine};
use crate::options::SuitesOptions;

/// Runs suites in short rounds, and returns their rows.
fn rows(arguments: &[&str]) -> Vec<ReportLine> {
    let program = ["suites", "--json", "--rounds", "5", "--round-ms", "1"];
    let options = SuitesOptions::try_parse_from(program.iter().chain(arguments)).unwrap();
    crate::run(&options).unwrap().lines().to_vec()
}

fn names(rows: &[ReportLine]) -> Vec<&str> {
    rows.iter().map(|row| &row.name[..]).collect()
}

#[test]
fn daemons_are_measured_as_processes() {
    if let Err(error) = crate::daemon::program() {
        println!("SKIPPED: {error}");
        return;
    }
    let sizes = ["--memory-size", "2MiB", "--stalled-size", "8MiB", "--restart-sizes", "1MiB,2MiB"];
    let rows = rows(&[&sizes[..], &["--suite", "memory,restart"]].concat());
    let expected = [
        "memory_overhead_idle",
        "memory_overhead",
        "memory_idle_connection",
        "push_64KiB_beside_stalled_reader",
        "push_64KiB_beside_stalled_reader_p99",
        "memory_stalled_reader_8MiB",
        "kill_to_lock_1MiB",
        "restart_1MiB",
        "kill_to_lock_2MiB",
        "restart_2MiB",
        "restart_flat",
    ];
    assert_eq!(names(&rows), expected);
    // The daemon itself takes more memory than such a small state.
    assert!(rows[0].ratio().unwrap() > 1.0, "{:?}", rows[0]);
    let connection = rows[2].ours;
    assert!((1.0..1024.0).contains(&connection), "a connection takes {connection} KiB");
}

#[test]
fn both_sides_of_a_model_are_measured() {
    if let Err(error) = crate::daemon::program() {
        println!("SKIPPED: {error}");
        return;
    }
    let mut report = Report::new(true);
    crate::footprint::run(16 << 20, std::time::Duration::ZERO, &mut report).unwrap();
    let rows = report.lines();
    let ratio = |name: &str| {
        let row = rows.iter().find(|row| row.name == name).unwrap();
        row.ratio().unwrap()
    };
    // Values and a second home for each, a push slot; with Adam, two slots as well. The worker is
    // this process, in which other tests run.
    for (row, least, most) in
        [("memory_tcp_sgd_directory", 3.0, 3.5), ("memory_tcp_adam_directory", 7.0, 7.5)]
    {
        let found = ratio(row);
        assert!((least..most).contains(&found), "{row}: {found} times the values");
    }
}

#[test]
fn many_variables_and_connections_are_measured() {
    let few = ["--suite", "scale", "--scale-variables", "20", "--scale-connections", "3"];
    let rows = rows(&few);
    let expected = [
        "scale_variables_20_pull",
        "scale_variables_20_push",
        "scale_variables",
        "scale_connections_3_pull",
        "scale_connections_3_push",
        "scale_connections",
    ];
    assert_eq!(names(&rows), expected);
    let ratio = |row: usize| rows[row].ratio().unwrap();
    assert!(ratio(2) >= ratio(0).max(ratio(1)) && ratio(5) >= ratio(3).max(ratio(4)));
}

#[test]
fn a_bad_value_is_reported_with_its_flag() {
    for (flag, value) in [
        ("--apply-sizes", "12B"),
        ("--restart-sizes", "0B"),
        ("--memory-size", "x"),
        ("--stalled-size", "9GiB"),
        ("--checkpoint-size", "7"),
        ("--suite", "all"),
        ("--page", "file:///tmp/x.md"),
    ] {
        let error = SuitesOptions::try_parse_from(["suites", flag, value]).unwrap_err();
        assert!(error.to_string().contains(flag), "{error}");
    }
}
