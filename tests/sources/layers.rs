//! Checks that dependencies point downwards, and that only listed files hold `unsafe`.
//!
//! The rules are the tables below; `ARCHITECTURE.md` gives their reasons. The checks themselves
//! are tested with planted violations.

use std::fs;
use std::path::{Path, PathBuf};

/// For each crate, the crates of `LAYERED` that it may depend on.
const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("common", &[]),
    ("common/checkpoint", &["pushpull-common", "pushpull-optim"]),
    ("common/net", &["pushpull-common", "tokio"]),
    ("common/optim", &["pushpull-common"]),
    ("ps/store", &["pushpull-common", "pushpull-optim"]),
    (
        "ps",
        &[
            "pushpull-checkpoint",
            "pushpull-common",
            "pushpull-net",
            "pushpull-optim",
            "pushpull-store",
            "tokio",
            "tokio-util",
        ],
    ),
    ("ps/remote", &["pushpull-checkpoint", "pushpull-common", "tokio"]),
    (
        "worker",
        &[
            "pushpull-checkpoint",
            "pushpull-collective",
            "pushpull-common",
            "pushpull-device",
            "pushpull-net",
            "pushpull-optim",
            "tokio",
        ],
    ),
    (
        "worker/services",
        &["pushpull-common", "pushpull-device", "pushpull-net", "pushpull-worker", "tokio"],
    ),
    (
        "worker/training",
        &["pushpull-collective", "pushpull-common", "pushpull-optim", "pushpull-worker", "tokio"],
    ),
    ("worker/collective", &["pushpull-common", "pushpull-net", "pushpull-optim", "tokio"]),
    // Encodes gradients where they are computed.
    ("worker/device", &["pushpull-common"]),
    // Stands in for a driver, so it knows nothing of what calls it.
    ("worker/device/emulator", &[]),
    // The facade: the crates below these are no part of its public face.
    (
        ".",
        &[
            "pushpull-collective",
            "pushpull-common",
            "pushpull-device",
            "pushpull-ps",
            "pushpull-remote",
            "pushpull-services",
            "pushpull-training",
            "pushpull-worker",
            "tokio",
        ],
    ),
];

/// The crates whose use is restricted to some layers.
const LAYERED: &[&str] = &[
    "pushpull",
    "pushpull-checkpoint",
    "pushpull-collective",
    "pushpull-common",
    "pushpull-device",
    "pushpull-ps",
    "pushpull-net",
    "pushpull-optim",
    "pushpull-remote",
    "pushpull-services",
    "pushpull-store",
    "pushpull-training",
    "pushpull-worker",
    "tokio",
    "tokio-util",
];

/// Words for clocks, sockets, threads, randomness, environment and global state. Pure parts may not
/// use them.
const IMPURE: &[&str] = &[
    "Instant::now",
    "SystemTime",
    "tokio",
    "std::net",
    "std::thread",
    "thread::spawn",
    "rand::",
    "RandomState",
    "std::env",
    "static",
];

/// The pure parts, each with the impure words that it may use nevertheless.
const PURE: &[(&str, &[&str])] = &[
    ("common/src", &[]),
    // A thread hashes what another writes.
    ("common/checkpoint/src", &["std::thread"]),
    ("common/optim/src", &[]),
    ("src/job", &[]),
    ("ps/src/shard", &[]),
    ("ps/src/aggregate", &[]),
    ("ps/src/push_window.rs", &[]),
    ("ps/src/inbox.rs", &[]),
    ("ps/src/inbox", &[]),
    ("ps/src/checkpoint_source.rs", &[]),
    ("ps/store/src/layout.rs", &[]),
    ("ps/store/src/commit.rs", &[]),
    ("ps/store/src/commit", &[]),
    ("ps/store/src/change.rs", &[]),
    ("ps/store/src/undo.rs", &[]),
    ("ps/store/src/store.rs", &[]),
    ("ps/store/src/store", &[]),
    ("ps/store/src/table", &[]),
    ("ps/src/peer_hello.rs", &[]),
    ("common/net/src/adaptive_spin.rs", &[]),
    ("common/net/src/contention.rs", &[]),
    // These files compare addresses but open no socket.
    ("common/net/src/waiting.rs", &["std::net"]),
    ("common/net/src/connect_race.rs", &["std::net"]),
    ("ps/src/testing/shard_endpoint.rs", &[]),
    ("ps/src/testing/shard_event.rs", &[]),
    ("worker/collective/src/element.rs", &[]),
    ("worker/collective/src/encoded.rs", &[]),
    ("worker/collective/src/encoded", &[]),
    ("worker/collective/src/fold.rs", &[]),
    ("worker/collective/src/fold", &[]),
    ("worker/collective/src/formed_ring.rs", &[]),
    ("worker/collective/src/gathered.rs", &[]),
    ("worker/collective/src/member.rs", &[]),
    ("worker/collective/src/reduction.rs", &[]),
    ("worker/collective/src/rendezvous", &[]),
    ("worker/collective/src/running.rs", &[]),
    ("worker/collective/src/schedule.rs", &[]),
    ("worker/collective/src/transfer.rs", &[]),
    ("worker/collective/src/waiting_links.rs", &[]),
    ("worker/services/src/call_session", &[]),
    ("worker/services/src/coordinator/call_digests.rs", &[]),
    ("worker/services/src/coordinator/decisions.rs", &[]),
    ("worker/services/src/description.rs", &[]),
    ("worker/services/src/device_name.rs", &[]),
    ("worker/services/src/dispatch", &[]),
    ("worker/services/src/function_table.rs", &[]),
    ("worker/services/src/outputs.rs", &[]),
    ("worker/services/src/service", &[]),
    ("worker/services/src/signature.rs", &[]),
    ("worker/services/src/value.rs", &[]),
    ("worker/services/src/value_body.rs", &[]),
    ("worker/src/testing", &[]),
    ("worker/services/src/testing", &[]),
    ("worker/src/session", &[]),
    ("worker/src/gradients", &[]),
    ("worker/src/clipping.rs", &[]),
    ("worker/src/loss_scale.rs", &[]),
    ("worker/src/ring/local_model.rs", &[]),
    ("worker/src/compression.rs", &[]),
    ("worker/src/compression", &[]),
    ("worker/src/initial_values.rs", &[]),
    ("worker/src/mapped_values.rs", &[]),
    ("worker/training/src/append_buffer.rs", &[]),
    ("worker/training/src/summary/event.rs", &[]),
    ("worker/training/src/summary/event_file_name.rs", &[]),
    ("worker/training/src/summary/exponential_buckets.rs", &[]),
    ("worker/training/src/summary/histogram.rs", &[]),
    ("worker/training/src/summary/hyperparameters.rs", &[]),
    ("worker/training/src/summary/image.rs", &[]),
    ("worker/training/src/summary/json_line.rs", &[]),
    ("worker/training/src/summary/protobuf_writer.rs", &[]),
    ("worker/training/src/data/permutation.rs", &[]),
    ("worker/training/src/backoff.rs", &[]),
    ("worker/training/src/checkpoint_cadence.rs", &[]),
    ("worker/training/src/checkpoint_plan.rs", &[]),
    ("worker/training/src/gradient_outcome.rs", &[]),
    ("worker/training/src/hook.rs", &[]),
    ("worker/training/src/hook_list.rs", &[]),
    ("worker/training/src/hooks", &[]),
    ("worker/training/src/lifecycle.rs", &[]),
    ("worker/training/src/lifecycle", &[]),
    ("worker/training/src/known_steps.rs", &[]),
    ("worker/training/src/recovery_window.rs", &[]),
    ("worker/training/src/scalars.rs", &[]),
    ("worker/device/emulator/src/scalar", &[]),
    ("worker/device/emulator/src/ptx", &[]),
    ("worker/device/emulator/src/machine", &[]),
    ("worker/device/src/cast.rs", &[]),
    ("worker/device/src/codec.rs", &[]),
    ("worker/device/src/kernels", &[]),
    ("worker/device/src/networks", &[]),
];

/// For each module, the modules that it may not name: dependencies in a crate point downwards, too.
const MODULES: &[(&str, &[&str])] = &[
    ("common/src/protocol", &["crate::catalogue", "crate::cluster", "crate::placement"]),
    ("common/src/shared_values", &["crate::protocol", "crate::catalogue", "crate::placement"]),
    ("common/src/codec", &["crate::protocol", "crate::catalogue", "crate::placement"]),
    ("common/src/codec.rs", &["crate::protocol", "crate::catalogue", "crate::placement"]),
    ("common/src/cluster", &["crate::protocol", "crate::placement", "crate::catalogue"]),
    ("common/src/cluster.rs", &["crate::protocol", "crate::placement", "crate::catalogue"]),
    // From the bottom up: layout, arena, commit, undo and change, table, store.
    (
        "ps/store/src/layout.rs",
        &[
            "crate::arena",
            "crate::commit",
            "crate::undo",
            "crate::change",
            "crate::table",
            "crate::store",
        ],
    ),
    (
        "ps/store/src/arena",
        &["crate::commit", "crate::undo", "crate::change", "crate::table", "crate::store"],
    ),
    ("ps/store/src/commit.rs", &["crate::undo", "crate::change", "crate::table", "crate::store"]),
    ("ps/store/src/commit", &["crate::undo", "crate::change", "crate::table", "crate::store"]),
    ("ps/store/src/undo.rs", &["crate::commit", "crate::table", "crate::store"]),
    (
        "ps/store/src/change.rs",
        &["crate::arena", "crate::commit", "crate::undo", "crate::table", "crate::store"],
    ),
    ("ps/store/src/table", &["crate::store"]),
    ("common/optim/src/volatile.rs", &["crate::optimizer"]),
    ("ps/src/checkpoint_source.rs", &["crate::shard", "crate::inbox", "crate::runtime"]),
    ("ps/src/shard", &["crate::runtime"]),
    ("ps/src/aggregate", &["crate::runtime", "crate::shard", "pushpull_store::store"]),
    ("ps/src/inbox", &["crate::runtime", "crate::shard", "pushpull_store::store"]),
    ("ps/src/inbox.rs", &["crate::runtime", "crate::shard", "pushpull_store::store"]),
    ("ps/src/push_window.rs", &["crate::runtime", "crate::shard", "pushpull_store::store"]),
    ("ps/src/client_key.rs", &["crate::runtime", "crate::shard"]),
    (
        "worker/src/session",
        &["crate::runtime", "crate::worker", "crate::client", "crate::pull_client"],
    ),
    ("worker/src/compression.rs", &["crate::session", "crate::runtime", "crate::worker"]),
    ("worker/services/src/call_session", SERVICES_RUNTIME),
    ("worker/services/src/coordinator/decisions.rs", SERVICES_RUNTIME),
    ("worker/services/src/dispatch", SERVICES_RUNTIME),
    ("worker/services/src/service", SERVICES_RUNTIME),
    ("worker/training/src/lifecycle.rs", TRAINING_RUNTIME),
    ("worker/training/src/lifecycle", TRAINING_RUNTIME),
    ("worker/training/src/hook_list.rs", TRAINING_RUNTIME),
    ("worker/training/src/hooks", TRAINING_RUNTIME),
    ("worker/training/src/append_buffer.rs", &["crate::tfrecord", "crate::summary"]),
    ("worker/training/src/summary", &["pushpull_worker"]),
    ("worker/training/src/tfrecord", &["pushpull_worker", "crate::summary"]),
    (
        "worker/training/src/data",
        &["pushpull_worker::internal", "crate::training_session", "crate::lifecycle"],
    ),
    (
        "worker/device/emulator/src/scalar",
        &["crate::ptx", "crate::machine", "crate::driver", "crate::control"],
    ),
    ("worker/device/emulator/src/ptx", &["crate::machine", "crate::driver", "crate::control"]),
    ("worker/device/emulator/src/machine", &["crate::driver", "crate::control"]),
    ("worker/device/emulator/src/driver", &["crate::control"]),
    (
        "worker/src/gradients",
        &[
            "crate::session",
            "crate::runtime",
            "crate::worker",
            "crate::client",
            "crate::pull_client",
            "crate::compression",
            "crate::devices",
        ],
    ),
];

/// What carries out the decisions about calls.
const SERVICES_RUNTIME: &[&str] = &[
    "crate::runtime",
    "crate::function_server",
    "crate::function_server_config",
    "crate::client",
    "crate::functions",
    "pushpull_worker::internal",
    "pushpull_worker::Worker",
    "pushpull_worker::Reader",
];

/// What carries out the decisions of a training's lifecycle, which may not name it.
const TRAINING_RUNTIME: &[&str] = &[
    "pushpull_worker::internal",
    "pushpull_worker::Worker",
    "pushpull_worker::Reader",
    "training_session",
    "session_replica",
    "training_config",
];

/// For a folder, its modules from the lowest to the highest. A module may name only lower ones.
const ORDERS: &[(&str, &[&str])] = &[(
    "worker/src/gradients",
    &[
        "pinned_words",
        "gradient_buffer",
        "pinned_pages",
        "parts",
        "sharding_plan",
        "packed_variables",
        "selection",
        "scatter",
        "row_ids",
        "row_requests",
        "duplicate_sums",
        "part_buffer",
        "rows",
        "staged_parts",
        "params",
        "dense_sum",
        "gradient_bytes",
    ],
)];

/// For a folder, the modules that own a part of its state, of which none may name another, and the
/// modules above them, which none of them may name.
const OWNERS: &[(&str, &[&str], &[&str])] = &[
    (
        "ps/src/shard",
        &["peers", "intake", "steps", "values", "pulls", "checkpoints", "shard_files"],
        &["Shard", "dispatch", "opening"],
    ),
    (
        "worker/src/session",
        &["operations", "requests", "pushes", "pulls", "tokens", "sharing", "progress"],
        &["Session", "work"],
    ),
    (
        "worker/services/src/service",
        &["clients", "executions", "parked_fetches", "run_queue"],
        &["Service", "calls", "endings", "fetches"],
    ),
    (
        "worker/collective/src/rendezvous",
        &["connections", "fences", "places", "ring", "waiting_list"],
        &["Rendezvous", "admission", "joining", "endings", "formation", "gathering"],
    ),
];

/// For a folder, its modules below the owners, which may name no owner.
const BELOW_OWNERS: &[(&str, &[&str])] = &[
    ("ps/src/shard", &["request", "file_work", "output", "input"]),
    ("worker/src/session", &["membership", "links", "encoded_values", "expectations", "io"]),
    ("worker/services/src/service", &["call_entry", "io"]),
    ("worker/collective/src/rendezvous", &["io", "outputs", "pacing"]),
];

/// The files that may hold `unsafe`.
const UNSAFE: &[&str] = &[
    "common/net/src/home_process.rs",
    "common/net/src/readiness.rs",
    "common/net/src/shared_pipe.rs",
    "common/net/src/stream.rs",
    "common/optim/src/optimizer/kernel.rs",
    "common/optim/src/volatile.rs",
    "ps/store/src/arena/memory.rs",
    "ps/store/src/arena/blocks.rs",
    "ps/store/src/cache.rs",
    // In-memory files of tests and the simulator.
    "ps/store/src/testing/test_files.rs",
    "worker/src/runtime/shared_memory.rs",
    // The emulated driver's C interface and the host memory behind it.
    "worker/device/emulator/src/control.rs",
    "worker/device/emulator/src/driver/abi/launches.rs",
    "worker/device/emulator/src/driver/abi/mod.rs",
    "worker/device/emulator/src/driver/abi/modules.rs",
    "worker/device/emulator/src/driver/abi/pointers.rs",
    "worker/device/emulator/src/driver/host_memory.rs",
    "worker/device/emulator/src/driver/shared.rs",
    "worker/device/emulator/src/driver/state/execution.rs",
    "worker/device/emulator/src/driver/work.rs",
    "worker/device/src/cpu/pool.rs",
    "worker/device/src/cuda/activation.rs",
    "worker/device/src/cuda/cast.rs",
    "worker/device/src/cuda/codec.rs",
    "worker/device/src/cuda/context.rs",
    "worker/device/src/cuda/cublas.rs",
    "worker/device/src/cuda/cuda_device.rs",
    "worker/device/src/cuda/cuda_memory.rs",
    "worker/device/src/cuda/driver.rs",
    "worker/device/src/cuda/elementwise.rs",
    "worker/device/src/cuda/embedding_bag.rs",
    "worker/device/src/cuda/gemm.rs",
    "worker/device/src/cuda/launch.rs",
    "worker/device/src/cuda/loss.rs",
    "worker/device/src/cuda/modules.rs",
    // The functions of NCCL's library, and the calls of them.
    "worker/device/src/cuda/nccl/communicator.rs",
    "worker/device/src/cuda/nccl/library.rs",
    "worker/device/src/cuda/pinned_memory.rs",
    "worker/device/src/transfer.rs",
    "worker/device/src/cpu/gemm.rs",
];

/// Description of one broken rule.
type Violation = String;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns every Rust file below a path, relative to the root, with its text.
pub(crate) fn sources(below: &str) -> Vec<(String, String)> {
    let mut files = Vec::new();
    collect(&root().join(below), &mut files);
    assert!(!files.is_empty(), "no sources below {below}");
    files.into_iter().map(read).collect()
}

/// Returns a file by its name relative to the root, with its text.
fn read(path: PathBuf) -> (String, String) {
    let name = path.strip_prefix(root()).unwrap().display().to_string();
    (name, fs::read_to_string(path).unwrap())
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            collect(&entry.unwrap().path(), files);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        files.push(path.to_owned());
    }
}

/// Finds the Rust files of all packages in a folder and below, but those of their test targets.
fn collect_products(folder: &Path, files: &mut Vec<PathBuf>) {
    let is_package = folder.join("Cargo.toml").is_file();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_built_or_test = is_package && ["target", "tests"].contains(&&*name);
        match path.is_dir() {
            _ if name.starts_with('.') || is_built_or_test => {}
            true => collect_products(&path, files),
            false => collect(&path, files),
        }
    }
}

/// Returns the code of a file without comments, up to its test module, and each path of a list of
/// imports on a line of its own.
fn code(text: &str) -> String {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code = product
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .fold(String::new(), |code, line| code + line + "\n");
    let lists = code.split("use ").filter_map(|import| {
        let (path, list) = import.split(';').next()?.split_once("::{")?;
        Some(list.split(',').map(move |name| format!("{path}::{}\n", name.trim())))
    });
    let paths: String = lists.flatten().collect();
    code + &paths
}

/// Whether code contains a word or path, but not as a part of a longer one or of a lifetime.
fn names(code: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        let open = word.ends_with([':', '{']) || !after.is_some_and(part);
        !before.is_some_and(|c| part(c) || c == '\'') && open
    })
}

fn is_test(file: &str) -> bool {
    file.contains("/tests/") || file.ends_with("/tests.rs")
}

fn check_words(file: &str, text: &str, forbidden: &[&str], allowed: &[&str]) -> Vec<Violation> {
    let code = code(text);
    let broken = forbidden.iter().filter(|word| !allowed.contains(word) && names(&code, word));
    broken.map(|word| format!("{file} names {word}")).collect()
}

fn check_dependencies(package: &str, manifest: &str, allowed: &[&str]) -> Vec<Violation> {
    let mut section = "";
    let mut broken = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        }
        let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
        let layered = LAYERED.contains(&name) && section == "[dependencies]";
        if layered && !allowed.contains(&name) {
            broken.push(format!("{package} depends on {name}"));
        }
    }
    broken
}

/// Checks that a module of a folder names only modules that come before it in their order.
fn check_order(folder: &str, file: &str, text: &str, order: &[&str]) -> Vec<Violation> {
    let module = Path::new(file).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let Some(place) = order.iter().position(|&other| other == module) else {
        return vec![format!("{file} is not in the order of {folder}")];
    };
    let parent = Path::new(folder).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let higher = order[place + 1..].iter();
    let names = higher.flat_map(|other| [format!("super::{other}"), format!("{parent}::{other}")]);
    let names: Vec<String> = names.chain(["super::{".to_owned()]).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    check_words(file, text, &names, &[])
}

/// Checks that a module of a folder names none of these other modules of it.
fn check_strangers(folder: &str, file: &str, text: &str, others: &[&str]) -> Vec<Violation> {
    let parent = Path::new(folder).file_name().unwrap_or_default().to_string_lossy().into_owned();
    // A file of the folder itself names its siblings by `super`; one below it, by `crate`.
    let is_direct =
        Path::new(file).parent() == Some(Path::new(folder)) || file.ends_with("/mod.rs");
    let names = others.iter().flat_map(|other| {
        let by_super = is_direct.then(|| format!("super::{other}"));
        by_super.into_iter().chain([format!("{parent}::{other}")])
    });
    let names: Vec<String> = names.collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    check_words(file, text, &names, &[])
}

fn check_unsafe(file: &str, text: &str) -> Vec<Violation> {
    let held = names(&code(text), "unsafe") && !UNSAFE.contains(&file);
    if held { vec![format!("{file} holds unsafe")] } else { Vec::new() }
}

#[test]
fn packages_depend_downwards() {
    for (package, allowed) in DEPENDENCIES {
        let manifest = fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
        assert_eq!(check_dependencies(package, &manifest, allowed), Vec::<Violation>::new());
    }
}

#[test]
fn the_pure_parts_use_no_clock_socket_thread_randomness_or_static() {
    for (part, allowed) in PURE {
        for (file, text) in sources(part).iter().filter(|(file, _)| !is_test(file)) {
            assert_eq!(check_words(file, text, IMPURE, allowed), Vec::<Violation>::new());
        }
    }
}

#[test]
fn modules_name_only_lower_modules() {
    for (part, forbidden) in MODULES {
        for (file, text) in sources(part).iter().filter(|(file, _)| !is_test(file)) {
            assert_eq!(check_words(file, text, forbidden, &[]), Vec::<Violation>::new());
        }
    }
}

#[test]
fn owners_do_not_name_each_other() {
    let files_of = |folder: &str, module: &str| {
        let path = format!("{folder}/{module}");
        let below = root().join(&path).is_dir();
        sources(&if below { path } else { path + ".rs" })
    };
    for &(folder, owners, above) in OWNERS {
        let lower = BELOW_OWNERS.iter().filter(|(of, _)| *of == folder);
        let lower: Vec<&str> = lower.flat_map(|(_, modules)| modules.iter().copied()).collect();
        for module in owners.iter().chain(&lower) {
            let others = owners.iter().filter(|other| *other != module).chain(above);
            let others: Vec<&str> = others.copied().collect();
            for (file, text) in files_of(folder, module).iter().filter(|(file, _)| !is_test(file)) {
                let broken = check_strangers(folder, file, text, &others);
                assert_eq!(broken, Vec::<Violation>::new());
            }
        }
    }
}

#[test]
fn modules_of_a_folder_name_only_earlier_ones() {
    for (folder, order) in ORDERS {
        let files = sources(folder);
        for (file, text) in files.iter().filter(|(file, _)| !file.ends_with("/mod.rs")) {
            assert_eq!(check_order(folder, file, text, order), Vec::<Violation>::new());
        }
        assert_eq!(files.len(), order.len() + 1, "{folder} has a file for each module");
    }
}

#[test]
fn only_listed_files_hold_unsafe() {
    let mut files = Vec::new();
    collect_products(&root(), &mut files);
    let files: Vec<_> = files.into_iter().map(read).collect();
    for (package, _) in DEPENDENCIES {
        let folder = format!("{package}/src/");
        let folder = folder.trim_start_matches("./");
        assert!(files.iter().any(|(file, _)| file.starts_with(folder)), "{folder} is left out");
    }
    for (file, text) in &files {
        assert_eq!(check_unsafe(file, text), Vec::<Violation>::new());
    }
    for file in UNSAFE {
        let text = fs::read_to_string(root().join(file)).unwrap();
        assert!(names(&code(&text), "unsafe"), "{file} holds no unsafe: unlist it");
    }
}

/// The files whose contracts number what may never happen, and the folders whose tests cite that.
const CONTRACTS: &[(&str, &str)] = &[
    ("ps/src/shard/mod.rs", "ps/src"),
    ("worker/services/src/service/mod.rs", "worker/services/src/service"),
    ("worker/collective/src/rendezvous/mod.rs", "worker/collective/src/rendezvous"),
    ("worker/src/session/mod.rs", "worker/src/session"),
    ("worker/training/src/lifecycle.rs", "worker/training/src/lifecycle"),
];

/// Returns whether a word is the number of an invariant, such as `S-1`.
fn is_invariant(word: &str) -> bool {
    let is_number = |number: &str| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    word.split_once('-').is_some_and(|(letter, number)| {
        letter.len() == 1 && letter.chars().all(|c| c.is_ascii_uppercase()) && is_number(number)
    })
}

/// Returns the invariants that a contract numbers.
fn invariants(contract: &str) -> Vec<&str> {
    let items = contract.lines().filter_map(|line| line.strip_prefix("/// - "));
    let numbers = items.filter_map(|item| item.split_once(':')).map(|(number, _)| number);
    numbers.filter(|number| is_invariant(number)).collect()
}

/// Returns the invariants that the comments of a file name.
fn citations(text: &str) -> Vec<&str> {
    let comments = text.lines().filter(|line| line.trim_start().starts_with("//"));
    let words = comments.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '-'));
    words.filter(|word| is_invariant(word)).collect()
}

/// Checks that each of these invariants is cited by a test, and that the files cite no others.
fn check_citations(numbers: &[&str], files: &[(String, String)]) -> Vec<Violation> {
    let cited = |number: &str| {
        let tests = files.iter().filter(|(file, _)| is_test(file) || file.contains("/testing/"));
        tests.flat_map(|(_, text)| citations(text)).any(|cited| cited == number)
    };
    let uncited = numbers.iter().filter(|number| !cited(number));
    let uncited = uncited.map(|number| format!("no test cites {number}"));
    let unknown = files.iter().flat_map(|(file, text)| {
        let cited = citations(text).into_iter().filter(|cited| !numbers.contains(cited));
        cited.map(move |cited| format!("{file} cites {cited}, which no contract numbers"))
    });
    uncited.chain(unknown).collect()
}

#[test]
fn every_numbered_invariant_is_cited_by_a_test_and_every_citation_exists() {
    for (contract, folder) in CONTRACTS {
        let text = fs::read_to_string(root().join(contract)).unwrap();
        let numbers = invariants(&text);
        assert!(numbers.len() > 3, "{contract} numbers {numbers:?}");
        let expected: Vec<String> =
            (1..=numbers.len()).map(|at| format!("{}-{at}", &numbers[0][..1])).collect();
        assert_eq!(numbers, expected, "{contract} counts its invariants");
        let files = sources(folder);
        assert_eq!(check_citations(&numbers, &files), Vec::<Violation>::new());
    }
}

#[test]
fn planted_violations_are_found() {
    let upward = "[package]\n[dependencies]\npushpull-worker.workspace = true\nbytes = \"1\"\n";
    assert_eq!(
        check_dependencies("ps", upward, &["pushpull-common"]),
        ["ps depends on pushpull-worker"]
    );
    let tests_only = "[dependencies]\nbytes = \"1\"\n[dev-dependencies]\ntokio = \"1\"\n";
    assert!(check_dependencies("common", tests_only, &[]).is_empty());
    assert_eq!(
        check_dependencies("common", "[dependencies]\ntokio = { version = \"1\" }\n", &[]),
        ["common depends on tokio"]
    );

    let clock = "fn now() -> Instant { std::time::Instant::now() }\n";
    assert_eq!(check_words("a.rs", clock, IMPURE, &[]), ["a.rs names Instant::now"]);
    let shared = "static NEXT: AtomicU64 = AtomicU64::new(0);\nfn f(name: &'static str) {}\n";
    assert_eq!(check_words("a.rs", shared, IMPURE, &[]), ["a.rs names static"]);
    let lifetime = "fn f(name: &'static str) { Bytes::from_static(b\"\"); }\n";
    assert!(check_words("a.rs", lifetime, IMPURE, &[]).is_empty());
    let comment = "// Instant::now is not read here\nfn f(now: Instant) {}\n";
    assert!(check_words("a.rs", comment, IMPURE, &[]).is_empty());
    let tests = "fn f() {}\n#[cfg(test)]\nmod tests { fn now() { Instant::now(); } }\n";
    assert!(check_words("a.rs", tests, IMPURE, &[]).is_empty());
    let below = "#[cfg(test)]\nmod tests;\nfn now() { Instant::now(); }\n";
    assert_eq!(check_words("a.rs", below, IMPURE, &[]), ["a.rs names Instant::now"]);
    let upward = "use crate::runtime::Core;\n";
    assert_eq!(
        check_words("a.rs", upward, &["crate::runtime"], &[]),
        ["a.rs names crate::runtime"]
    );
    assert!(!names("use crate::runtimes;", "crate::runtime"));
    let listed = "use other::{\n    Error, Worker,\n};\nuse crate::{Reader, other};\n";
    assert_eq!(check_words("a.rs", listed, &["other::Worker"], &[]), ["a.rs names other::Worker"]);
    assert!(check_words("a.rs", listed, &["other::Reader"], &[]).is_empty());

    let order = ["low", "middle", "high"];
    let check = |text| check_order("a/b", "a/b/middle.rs", text, &order);
    assert!(check("use super::low::Low;\nuse crate::b::low;\n").is_empty());
    assert_eq!(check("use super::high::High;\n"), ["a/b/middle.rs names super::high"]);
    assert_eq!(check("use crate::b::high::High;\n"), ["a/b/middle.rs names b::high"]);
    assert_eq!(
        check_order("a/b", "a/b/new.rs", "", &order),
        ["a/b/new.rs is not in the order of a/b"]
    );

    let check = |text| check_strangers("a/b", "a/b/peers/mod.rs", text, &["intake", "Shard"]);
    assert!(check("use super::output::Outputs;\nuse crate::b::request::Request;\n").is_empty());
    assert_eq!(check("use super::intake::Intake;\n"), ["a/b/peers/mod.rs names super::intake"]);
    assert_eq!(check("use crate::b::Shard;\n"), ["a/b/peers/mod.rs names b::Shard"]);
    assert_eq!(check("use crate::b::{intake, output};\n"), ["a/b/peers/mod.rs names b::intake"]);

    let contract = "/// - **In**: messages\n/// - X-1: never\n/// - X-2: ever\n";
    assert_eq!(invariants(contract), ["X-1", "X-2"]);
    let check = |file: &str, text: &str| {
        check_citations(&["X-1", "X-2"], &[(file.to_owned(), text.to_owned())])
    };
    assert!(check("a/tests/b.rs", "// X-1, X-2.\n#[test]\nfn f() {}\n").is_empty());
    assert_eq!(check("a/tests/b.rs", "    // X-1, and UTF-8.\n"), ["no test cites X-2"]);
    assert_eq!(check("a/b.rs", "// X-1, X-2.\n"), ["no test cites X-1", "no test cites X-2"]);
    assert_eq!(
        check("a/tests.rs", "// X-1, X-2, X-3.\n"),
        ["a/tests.rs cites X-3, which no contract numbers"]
    );

    let held = "fn f() { unsafe { g() } }\n";
    assert_eq!(check_unsafe("ps/src/shard/mod.rs", held), ["ps/src/shard/mod.rs holds unsafe"]);
    assert!(check_unsafe("ps/store/src/arena/memory.rs", held).is_empty());
    assert!(check_unsafe("a.rs", "#![forbid(unsafe_code)]\n").is_empty());
}
