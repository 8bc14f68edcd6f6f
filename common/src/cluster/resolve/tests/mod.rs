//! Tables of variables and flags, and the clusters and tasks resolved from them.

use proptest::prelude::*;

use super::*;
use crate::launch::variable_table::{VariableCase, cases};

/// Returns the resolver of a case, and the knowledge of its caller.
fn request(case: &VariableCase<'_>) -> (Resolver, Known) {
    let mut resolver = Resolver::Auto;
    let mut known = Known::default();
    for &(flag, value) in &case.flags {
        match flag {
            "resolve" => resolver = value.parse().expect("the name of a resolver"),
            flag => set_flag(&mut known, flag, value),
        }
    }
    (resolver, known)
}

fn set_flag(known: &mut Known, flag: &str, value: &str) {
    let number = || value.parse::<u32>().expect("a number");
    let jobs = |job: &str| ClusterSpec::builder().job(job, value.split(',')).build();
    match flag {
        "ps-hosts" => known.jobs.push(("--ps-hosts", jobs("ps").expect("addresses"))),
        "worker-hosts" => known.jobs.push(("--worker-hosts", jobs("worker").expect("addresses"))),
        "job-name" => known.job = Some(value.to_owned()),
        "task-index" => known.index = Some(number()),
        "num-ps" => known.num_ps = Some(number()),
        "num-workers" => known.num_workers = Some(number()),
        "base-port" => known.base_port = value.parse().expect("a port"),
        "ps-service" => known.ps_service = Some(value.to_owned()),
        "socket-folder" => known.socket_folder = Some(value.into()),
        "rendezvous" => known.rendezvous = Some(value.to_owned()),
        "advertise" => known.advertised_host = Some(value.to_owned()),
        "task-id" => known.task_id = Some(value.to_owned()),
        "parent" => known.parent_process = Some(number()),
        other => panic!("unknown flag {other}"),
    }
}

/// Formats a resolution as the tables do.
fn text(case: &VariableCase<'_>) -> String {
    let lookup = |name: &str| case.variables.get(name).map(|&value| value.to_owned());
    let (resolver, known) = request(case);
    match resolve(resolver, &lookup, &known) {
        Ok(Resolution { rendezvous: Some(plan), task, source, .. }) => {
            format!(
                "{source}: {}{}",
                plan_text(&plan),
                task.map_or(String::new(), |task| format!(" as {task}"))
            )
        }
        Ok(Resolution { cluster, task, source, .. }) => {
            let task = task.map_or("no task".to_owned(), |task| task.to_string());
            format!("{source}: {task} of {cluster}")
        }
        Err(error) => error.to_string(),
    }
}

fn plan_text(plan: &RendezvousPlan) -> String {
    let RendezvousPlan { address, size, is_here, task } = plan;
    let serves = if *is_here { "serves and " } else { "" };
    let does = task.as_ref().map_or("registers nothing".to_owned(), |task| {
        let key = task.id.as_ref().map_or("any".to_owned(), |id| format!("{id:?}"));
        let key = task.index.map_or(key, |index| index.to_string());
        let host = task.host.as_deref().unwrap_or("*");
        let port = task.port.map_or("no port".to_owned(), |port| format!("{host}:{port}"));
        format!("registers {} {key} with {port}", task.job)
    });
    format!("{serves}{does} at {address} for {}+{}", size.num_ps(), size.num_workers())
}

#[test]
fn variables_and_flags_give_a_cluster_or_name_their_fault() {
    let cases = cases(include_str!("sources.txt"));
    assert_eq!(cases.len(), 86);
    let differ: Vec<_> = cases
        .iter()
        .filter(|case| text(case) != case.expected)
        .map(|case| format!("line {}: {}\n", case.line, text(case)))
        .collect();
    assert!(differ.is_empty(), "{}", differ.concat());
}

#[test]
fn without_one_of_its_variables_a_process_is_never_another_task() {
    for case in cases(include_str!("sources.txt")) {
        let lookup = |name: &str| case.variables.get(name).map(|&value| value.to_owned());
        let (resolver, known) = request(&case);
        let Ok(whole) = resolve(resolver, &lookup, &known) else { continue };
        for gone in case.variables.keys() {
            let without = |name: &str| lookup(name).filter(|_| name != *gone);
            let found = resolve(resolver, &without, &known);
            let Ok(found) = found else { continue };
            // Without an index the rendezvous assigns one.
            let is_assigned = found.rendezvous.is_some() && found.task.is_none();
            if found.source == whole.source && !is_assigned {
                assert_eq!(found.task, whole.task, "line {}, without {gone}", case.line);
                assert_eq!(found.cluster, whole.cluster, "line {}, without {gone}", case.line);
            }
        }
    }
}

#[test]
fn every_source_says_why_it_was_not_taken() {
    let lookup = |name: &str| {
        let value = match name {
            "TF_CONFIG" => r#"{"cluster":{"ps":["a:1"]},"task":{"type":"ps","index":0}}"#,
            "OMPI_COMM_WORLD_RANK" => "1",
            "OMPI_COMM_WORLD_SIZE" => "2",
            "CLUSTER_SPEC" => "{",
            _ => return None,
        };
        Some(value.to_owned())
    };
    let resolved = resolve(Resolver::Auto, &lookup, &Known::default()).expect("a TF_CONFIG");
    let passed: Vec<_> =
        resolved.passed.iter().map(|(source, reason)| format!("{source}: {reason}")).collect();
    let expected = [
        "flags: --ps-hosts is not given",
        "tony: tf-config comes first, and: cannot use CLUSTER_SPEC: cannot read the cluster as JSON: \
         EOF while parsing an object at line 1 column 1",
        "dmlc: DMLC_ROLE is not set",
        "slurm: the rank of this process is one of Open MPI",
        "mpi: tf-config comes first, and: cannot resolve the cluster by mpi: --num-ps is needed, the \
         number of the first ranks that are ps tasks",
        "kubernetes: KUBERNETES_SERVICE_HOST is not set",
    ];
    assert_eq!(passed, expected);
    assert_eq!(resolved.taken.len(), 1);
}

#[test]
fn a_list_of_nodes_is_bounded_before_it_is_expanded() {
    let long = format!("a[1-{}]", 1 << 16);
    assert_eq!(expand_node_list(&long).map(|hosts| hosts.len()), Ok(1 << 16));
    for list in
        ["a[1-1000000]", "a[1-4000000000]x[1-4000000000]", "a[1-65536],b", "a[1-300]b[1-300]"]
    {
        assert_eq!(expand_node_list(list), Err(NodeListProblem::TooMany), "{list}");
    }
}

#[test]
fn a_malformed_list_of_nodes_names_its_fault() {
    use NodeListProblem::*;
    let table = [
        ("", EmptyName),
        ("a,", EmptyName),
        ("a[1-2]b", Suffix("b".into())),
        ("n[1-2]-ib", Suffix("-ib".into())),
        ("n[1-", Brackets),
        ("n1-2]", Brackets),
        ("n[[1]]", Brackets),
        ("n[2-1]", Reversed("2-1".into())),
        ("n[]", Range(String::new())),
        ("n[1,]", Range(String::new())),
        ("n[1-2-3]", Range("1-2-3".into())),
        ("n[+1]", Range("+1".into())),
        ("n[99999999999]", Range("99999999999".into())),
        ("a b", Character(' ')),
        ("ü", Character('ü')),
        ("a:1", Character(':')),
    ];
    for (list, problem) in table {
        assert_eq!(expand_node_list(list), Err(problem), "{list}");
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_list_of_nodes_panic_or_grow(list in "[a-c0-9,\\[\\]-]{0,40}") {
        if let Ok(hosts) = expand_node_list(&list) {
            prop_assert!(hosts.len() <= ClusterSpec::TASKS_MAX);
            prop_assert!(hosts.iter().all(|host| !host.is_empty() && !host.contains('[')));
        }
    }

    #[test]
    fn plain_names_are_their_own_expansion(names in prop::collection::vec("[a-z][a-z0-9.-]{0,9}", 1..9)) {
        prop_assert_eq!(expand_node_list(&names.join(",")), Ok(names));
    }
}
