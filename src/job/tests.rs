//! Job files as tables: what they build, and how each fault is named.

use std::path::Path;

use super::keys::{KEYS, Kind};
use super::*;
use pushpull_common::cluster::resolve::resolve;

fn parse(text: &str) -> Result<Job, JobError> {
    Job::parse(text, "job.toml")
}

fn error(text: &str) -> String {
    parse(text).map(|job| job.settings.to_string()).unwrap_err().to_string()
}

const CLUSTER: &str = "[cluster]\nps_hosts = [\"a:1\", \"b:1\"]\nworker_hosts = \"c:1,d:1\"\n";

/// The servers of a job, as text.
fn server(text: &str) -> Result<String, JobError> {
    let job = parse(&format!("{CLUSTER}{text}"))?;
    Ok(format!("{:?}", job.ps_config(TaskId::ps(1))?))
}

#[test]
fn a_file_and_flags_build_the_same_server() {
    let file = server(
        "[storage]\nshards = 2\nstate_dir = \"/dev/shm/{task}\"\nbytes_max = \"1G\"\n\
         [network]\nbusy_poll = \"1ms\"\n\
         [optimizer]\nname = \"adam\"\nlearning_rate = 1\nrate_for = [\"b*=0.5\"]\n\
         [mode]\nsynchronous = \"2/2\"\njoin_timeout = \"1min\"\n\
         [training]\nlast_step = 1_000\nlease_ms = 700\neffects_kept = \"2d\"\n",
    );
    let mut settings = Settings::default();
    for (flag, value) in [
        ("shards", "2"),
        ("state-dir", "/dev/shm/1"),
        ("bytes-max", "1073741824"),
        ("busy-poll-us", "1000"),
        ("optimizer", "adam"),
        ("learning-rate", "1"),
        ("rate-for", "b*=0.5"),
        ("synchronous", "2/2"),
        ("join-timeout-ms", "60000"),
        ("last-step", "1000"),
        ("lease-ms", "700"),
        ("effects-kept-hours", "48"),
    ] {
        settings.set_flag(flag, [value]);
    }
    let cluster = parse(CLUSTER).unwrap().cluster().unwrap();
    let flags = settings.ps_config(cluster, TaskId::ps(1)).unwrap();
    assert_eq!(file.unwrap(), format!("{flags:?}"));
}

#[test]
fn unknown_names_are_refused_with_the_nearest_and_their_line() {
    for (text, expected) in [
        (
            "# comment\n\n[optimiser]\nname = \"sgd\"",
            "job.toml:3: unknown table \"optimiser\": the nearest is \"optimizer\"",
        ),
        (
            "[training]\n\nlast_steps = 3",
            "job.toml:3: unknown key \"last_steps\": the nearest is \"last_step\"",
        ),
        ("[training]\nleas = \"5s\"", "job.toml:2: unknown key \"leas\": the nearest is \"lease\""),
        (
            "[training]\nlearning_rate = 0.5",
            "job.toml:2: unknown key \"learning_rate\": it belongs to the table [optimizer]",
        ),
        (
            "last_step = 3",
            "job.toml:1: unknown key \"last_step\": it belongs to the table [training]",
        ),
        (
            "[cluster]\ntask_index = 3",
            "job.toml:2: unknown key \"task_index\": each process has its own --task-index",
        ),
        (
            "[functions]\nabc = 3",
            "job.toml:2: unknown key \"abc\": expected one of no_functions, cuda",
        ),
        ("mode = 3", "job.toml:1: mode: expected a table: [mode]"),
        ("[[mode]]\nissync = 1", "job.toml:1: mode: expected a table: [mode]"),
    ] {
        assert_eq!(error(text), expected);
    }
    let long = "x".repeat(100_000);
    assert!(error(&format!("[mode]\n{long} = 1")).len() < 300);
    assert!(error(&format!("[mode]\non_loss = \"{long}\"")).len() < 300);
}

#[test]
fn invalid_values_are_refused_with_key_line_and_value() {
    for (text, expected) in [
        ("[storage]\nshards = \"2\"", "2: shards = \"2\": expected a whole number from 1 on"),
        ("[storage]\nshards = 0", "2: shards = 0: expected a whole number from 1 on"),
        ("[storage]\nshards = -1", "2: shards = -1: expected a whole number from 1 on"),
        ("[storage]\nshards = 1.0", "2: shards = 1.0: expected a whole number from 1 on"),
        ("[storage]\nbytes_max = \"16X\"", "2: bytes_max = \"16X\": \"X\" is no unit of bytes"),
        ("[storage]\nbytes_max = true", "2: bytes_max = true: expected a number of bytes"),
        ("[storage]\nstate_dir = 3", "2: state_dir = 3: expected the text of a path"),
        (
            "[storage]\nstate_dir = \"s3://bucket/state\"",
            "2: state_dir = \"s3://bucket/state\": the scheme \"s3\" of",
        ),
        (
            "[storage]\ndurability = \"eternal\"",
            "durability = \"eternal\": expected one of process, power",
        ),
        ("[network]\ninsecure = 1", "2: insecure = 1: expected true or false"),
        ("[optimizer]\nlearning_rate = nan", "2: learning_rate = nan: expected a finite number"),
        ("[optimizer]\nlearning_rate = -inf", "2: learning_rate = -inf: expected a finite number"),
        ("[optimizer]\nlearning_rate = \"fast\"", "2: learning_rate = \"fast\": expected a number"),
        ("[optimizer]\nname = \"adagard\"", "2: name = \"adagard\": expected one of sgd, "),
        ("[optimizer]\nschedule = \"sine:0/9\"", "2: schedule = \"sine:0/9\": unknown schedule"),
        (
            "[optimizer]\noptimizer_for = [\"a=adam\", \"b=adam --rho 1\"]",
            "\"b=adam --rho 1\": --rho 1: --optimizer adam does not take --rho",
        ),
        ("[optimizer]\nrate_for = \"a=1\"", "2: rate_for = \"a=1\": expected a list of texts"),
        ("[mode]\nsynchronous = \"3:4\"", "2: synchronous = \"3:4\": expected A/R"),
        ("[mode]\nstaleness = \"damp:1\"", "2: staleness = \"damp:1\": expected ignore, damp"),
        (
            "[training]\nlease = 5",
            "2: lease = 5: expected a text such as \"5s\"; lease_ms is a number",
        ),
        (
            "[training]\nlease = \"5\"",
            "2: lease = \"5\": expected a whole number with one of the units",
        ),
        ("[training]\nlease = \"1us\"", "2: lease = \"1us\": expected a multiple of 1ms"),
        (
            "[training]\nlease = \"99999999999999d\"",
            "expected a whole number with one of the units",
        ),
        (
            "[training]\nlease_ms = \"5s\"",
            "2: lease_ms = \"5s\": expected a whole number from 0 on",
        ),
        (
            "[training]\nlease = \"5s\"\nlease_ms = 4000",
            "3: lease_ms = 4000: job.toml:2: lease = \"5s\" is the same setting",
        ),
        ("[training]\nlast_step = 1\nlast_step = 2", "job.toml:3: duplicate key"),
        ("[training]\nlast_step = ", "job.toml:2: "),
        ("[cluster]\nps_hosts = []", "2: ps_hosts = []: expected at least one address"),
        ("[cluster]\nps_hosts = \"a:1,,b:1\"", "2: ps_hosts = \"a:1,,b:1\": address 1 is empty"),
        ("[cluster]\nps_hosts = [\"a:1\", 2]", "expected a list of addresses"),
        (
            "[cluster]\nps_hosts = [\"a:1\"]\nnum_ps = 2",
            "3: num_ps = 2: the cluster of this file lists 1",
        ),
        (
            "[cluster]\nspec = \"ps=a:1;worker=b:1\"\nnum_workers = 3",
            "3: num_workers = 3: the cluster of this file lists 1",
        ),
        (
            "[cluster]\nspec = \"ps=a:1\"\nps_hosts = \"a:1\"",
            "3: ps_hosts = \"a:1\": job.toml:2: spec = \"ps=a:1\" is the whole cluster",
        ),
        (
            "[cluster]\nspec = \"ps=a:1\"\nresolve = \"slurm\"",
            "3: resolve = \"slurm\": job.toml:2: spec = \"ps=a:1\" is the whole cluster",
        ),
        ("[cluster]\nresolve = \"slrum\"", "2: resolve = \"slrum\": "),
        ("[worker]\nargs = \"--steps 3\"", "2: args = \"--steps 3\": expected a list of texts"),
    ] {
        let error = error(text);
        assert!(error.contains(expected) && error.starts_with("job.toml:"), "{error}");
    }
}

#[test]
fn contradictions_are_refused_when_a_server_is_built() {
    for (text, expected) in [
        (
            "[mode]\nsynchronous = \"2/2\"\nstaleness = \"damp\"",
            "job.toml:6: staleness = \"damp\": it is for asynchronous training, and the mode is that \
             of job.toml:5: synchronous = \"2/2\"",
        ),
        (
            "[storage]\nintegrity_full = true",
            "job.toml:5: integrity_full = true: it has no effect without --state-dir",
        ),
        (
            "[training]\nexit_grace = \"5s\"",
            "job.toml:5: exit_grace = \"5s\": it has no effect without --exit-when-done",
        ),
        (
            "[optimizer]\nbeta1 = 0.5",
            "job.toml:5: beta1 = 0.5: --optimizer sgd does not take --beta1, only",
        ),
        ("[optimizer]\nlearning_rate = -1", "job.toml:5: learning_rate = -1: "),
        (
            "[optimizer]\nname = \"momentum\"",
            "job.toml:5: name = \"momentum\": it needs --momentum",
        ),
        (
            "[checkpoints]\ncheckpoint_dir = \"/dev/null/x\"",
            "job.toml:5: checkpoint_dir = \"/dev/null/x\": ",
        ),
        ("[storage]\nshards = 70000", "job.toml:5: shards = 70000: number too large"),
    ] {
        let error = server(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = parse("[cluster]\nnum_ps = 2").unwrap().ps_config(TaskId::ps(0)).unwrap_err();
    assert!(matches!(error, JobError::NoCluster), "{error}");
    let error = parse("[cluster]\nps_hosts = \"nowhere\"").unwrap().cluster().unwrap_err();
    assert!(error.to_string().starts_with("job.toml:2: ps_hosts = \"nowhere\": "), "{error}");
}

#[test]
fn files_that_are_none_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let said = |path: &Path| {
        let error = Job::read(path).map(drop).unwrap_err();
        pushpull_common::error::Chain(&error).to_string()
    };
    std::fs::write(path("latin"), b"# fine\n[mode]\n# \xe9\n").unwrap();
    assert!(said(&path("latin")).ends_with("latin:3: the line is not UTF-8"));
    // A hole of 1 GB, which costs no disk.
    std::fs::File::create(path("large")).unwrap().set_len(1 << 30).unwrap();
    let error = said(&path("large"));
    assert!(error.ends_with("it has 1073741824 bytes, more than 1048576"), "{error}");
    let pipe = path("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(said(&pipe).ends_with("it is a pipe"));
    assert!(said(folder.path()).ends_with("it is a directory"));
    assert!(said(&path("none")).contains("No such file"));
    assert!(said(Path::new("s3://bucket/job.toml")).contains("the scheme \"s3\""));
    let nested = format!("[mode]\non_loss = {}", "[".repeat(100_000));
    assert!(error_is_short(&nested));
}

fn error_is_short(text: &str) -> bool {
    error(text).len() < 300
}

#[test]
fn settings_print_as_a_job_file_with_origins() {
    let text = "[optimizer]\nname = \"adam\"\nrate_for = [\"a\\\"b=1\"]\n[training]\nlease = \"5s\"\n\
                [storage]\nbytes_max = \"1K\"\n";
    let mut settings = parse(text).unwrap().settings;
    settings.set_flag("last-step", ["7"]);
    settings.set_default("shards", ["1"]);
    settings.set_flag("state-dir", ["/tmp/é\t\\"]);
    settings.set_default("lease-ms", ["1"]);
    let printed = settings.to_string();
    for line in [
        "[storage]",
        "# shards = 1                             # default",
        "bytes_max = 1024                         # job.toml:7",
        "state_dir = \"/tmp/é\\u0009\\\\\"             # flag",
        "name = \"adam\"                            # job.toml:2",
        "rate_for = [\"a\\\"b=1\"]                    # job.toml:3",
        "last_step = 7                            # flag",
        "lease_ms = 5000                          # job.toml:5",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line} in\n{printed}");
    }
    // What is printed is a job file with the same values.
    let again = Job::parse(&printed, "printed").unwrap().settings;
    settings.remove("shards");
    let texts = |settings: &Settings| {
        let all = settings.iter().map(|(flag, setting)| (flag, setting.texts().to_vec()));
        all.collect::<Vec<_>>()
    };
    assert_eq!(texts(&again), texts(&settings));
}

#[test]
fn the_page_has_every_key_and_its_example_is_a_job() {
    let page = include_str!("../../docs/job.md");
    for key in KEYS {
        let row = format!("| `{}`", key.name);
        let rows: Vec<_> = page.lines().filter(|line| line.starts_with(&row)).collect();
        assert!(!rows.is_empty(), "{row}");
        if let (Kind::Time(_), Some(name)) = (key.kind, key.name_of_text()) {
            assert!(rows.iter().any(|row| row.contains(&format!("`{name}`"))), "{name}");
        }
    }
    let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let job = Job::parse(example, "docs/job.md").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut settings = job.settings().clone();
    settings.set_flag("checkpoint-dir", [folder.path().to_str().unwrap()]);
    let cluster = job.cluster().unwrap();
    settings.ps_config(cluster, TaskId::ps(0)).unwrap();
    assert!(settings.local_checkpoints().unwrap().is_some());
    job.worker_config(TaskId::worker(0)).unwrap();
    assert_eq!((job.num_ps(), job.num_workers()), (Some(2), Some(3)));
    assert!(job.program().is_some() && !job.args().is_empty());
}

#[test]
fn a_launcher_completes_a_file() {
    let text =
        "[cluster]\nresolve = \"slurm\"\nnum_ps = 1\nbase_port = 3000\n[training]\nlast_step = 9";
    let job = parse(text).unwrap();
    assert!(matches!(job.worker_config(TaskId::worker(0)), Err(JobError::NoCluster)));
    let variables = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "3"),
        ("SLURM_STEP_NODELIST", "n[1-3]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x3)"),
    ];
    let lookup = |name: &str| {
        variables
            .iter()
            .find_map(|(variable, value)| (*variable == name).then(|| (*value).to_owned()))
    };
    let resolver = job.resolver().unwrap().unwrap();
    let found = resolve(resolver, &lookup, &job.known().unwrap()).unwrap();
    assert_eq!(found.task, Some(TaskId::worker(1)));
    let job = job.with_cluster(found.cluster);
    assert_eq!(job.cluster().unwrap().task_address("ps", 0), Ok("n1:3000"));
    assert!(job.ps_config(TaskId::ps(0)).is_ok() && job.worker_config(TaskId::worker(1)).is_ok());

    let job = parse(&text.replace("num_ps = 1", "num_ps = 1\nnum_workers = 9")).unwrap();
    let error = resolve(resolver, &lookup, &job.known().unwrap()).unwrap_err();
    assert!(error.to_string().contains("SLURM_NTASKS=3"), "{error}");
}
