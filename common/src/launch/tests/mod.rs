//! Tables of variables, and the places read from them.

use std::collections::BTreeMap;

use super::variable_table::{VariableCase, cases};
use super::{Launch, LaunchError};

fn launch(variables: &BTreeMap<&str, &str>) -> Result<Launch, LaunchError> {
    Launch::from_lookup(|name| variables.get(name).map(|&value| value.to_owned()))
}

/// Formats a place as the tables do.
fn text(launch: &Result<Launch, LaunchError>) -> String {
    let launch = match launch {
        Ok(launch) => launch,
        Err(error) => return error.to_string(),
    };
    let key = launch.job_key().unwrap_or("no key");
    let address = launch.rendezvous().map(|address| format!(", at {address}"));
    format!(
        "{}: rank {} of {}, local {} of {}, {key}{}",
        launch.launcher(),
        launch.rank(),
        launch.size(),
        launch.local_rank(),
        launch.local_size(),
        address.unwrap_or_default()
    )
}

fn check(table: &str, count: usize) {
    let cases = cases(table);
    assert_eq!(cases.len(), count);
    for VariableCase { line, variables, expected, .. } in cases {
        assert_eq!(text(&launch(&variables)), expected, "line {line}");
    }
}

#[test]
fn variables_give_a_place_or_name_their_fault() {
    check(include_str!("places.txt"), 55);
}

#[test]
fn recorded_variables_of_launchers_give_their_places() {
    check(include_str!("dumps.txt"), 20);
}

/// The variables that tell a Slurm step from the launchers inside it.
const DISTINGUISHING: [&str; 4] = ["MPI_LOCALRANKID", "RANK", "SLURM_JOB_ID", "SLURM_STEP_ID"];

#[test]
fn without_one_of_its_variables_a_process_never_takes_another_rank() {
    for table in [include_str!("places.txt"), include_str!("dumps.txt")] {
        for VariableCase { line, variables, .. } in cases(table) {
            let Ok(whole) = launch(&variables) else {
                continue;
            };
            for name in variables.keys().filter(|name| !DISTINGUISHING.contains(name)) {
                let mut without = variables.clone();
                without.remove(name);
                let mut empty = variables.clone();
                empty.insert(name, "");
                for found in [launch(&without), launch(&empty)].into_iter().flatten() {
                    assert_eq!(found.rank(), whole.rank(), "line {line}, {name}");
                    assert_eq!(found.size(), whole.size(), "line {line}, {name}");
                }
            }
        }
    }
}

#[test]
fn a_program_gives_its_place_by_hand() {
    let table = [
        (0, 1, "the program: rank 0 of 1, local 0 of 1, no key"),
        (1023, 1024, "the program: rank 1023 of 1024, local 1023 of 1024, no key"),
        (0, 0, "cannot use size=0: a size is a number from 1 to 1024"),
        (0, 1025, "cannot use size=1025: a size is a number from 1 to 1024"),
        (2, 2, "cannot use rank=2 with size=2: ranks begin at 0"),
    ];
    for (rank, size, expected) in table {
        assert_eq!(text(&Launch::new(rank, size)), expected);
    }
}

#[test]
fn the_parent_process_is_the_job_where_the_launcher_passes_none() {
    let mpich = BTreeMap::from([("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
    let mpich = launch(&mpich).unwrap().parent_process(4711);
    assert_eq!(mpich.job_key(), Some("mpich-parent-4711"));
    let mut open_mpi =
        BTreeMap::from([("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")]);
    open_mpi.insert("PMIX_NAMESPACE", "1092026369");
    let open_mpi = launch(&open_mpi).unwrap().parent_process(4711);
    assert_eq!(open_mpi.job_key(), Some("open-mpi-1092026369"));
    let alone = Launch::new(0, 1).unwrap().parent_process(u32::MAX);
    assert_eq!(alone.job_key(), Some("program-parent-4294967295"));
}
