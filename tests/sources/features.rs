//! Checks what a program compiles with each set of features of the facade.

use std::collections::BTreeSet;
use std::process::Command;

/// The crates of this workspace that every program compiles.
const ALWAYS: [&str; 8] = [
    "pushpull",
    "pushpull-checkpoint",
    "pushpull-common",
    "pushpull-net",
    "pushpull-optim",
    "pushpull-ps",
    "pushpull-store",
    "pushpull-worker",
];

/// For features, the crates of this workspace that a program compiles beside [`ALWAYS`].
const BESIDE: &[(&str, &[&str])] = &[
    ("", &[]),
    ("default", &["pushpull-training"]),
    ("services", &["pushpull-services", "pushpull-device"]),
    ("compute", &["pushpull-device"]),
    ("ring", &["pushpull-collective"]),
    ("csv", &["pushpull-training"]),
    ("job", &[]),
    ("s3", &["pushpull-remote"]),
    ("hdfs", &["pushpull-remote"]),
];

/// For crates of others, the features with which a program compiles them.
const OTHERS: &[(&str, &[&str])] = &[
    ("matrixmultiply", &["compute"]),
    ("libm", &["", "default", "services", "compute", "ring", "csv", "job", "s3", "hdfs"]),
    // The client of HDFS loads the library of Kerberos, if it is asked to use it.
    ("libloading", &["hdfs"]),
    ("cudarc", &[]),
    ("crossbeam-deque", &["services", "compute"]),
    ("flate2", &[]),
    ("png", &[]),
    ("clap", &[]),
    ("toml", &["job"]),
    ("object_store", &["s3", "hdfs"]),
    ("reqwest", &["s3"]),
    ("hdfs-native", &["hdfs"]),
    ("openssl", &[]),
    ("openssl-sys", &[]),
    ("aws-lc-rs", &[]),
    ("aws-lc-sys", &[]),
];

/// Returns the crates that a program compiles with these features of the facade; `None` if one of them
/// was never fetched and cannot be.
fn compiled(features: &str) -> Option<BTreeSet<String>> {
    let tree = |net: &[&str]| {
        Command::new(env!("CARGO"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["tree", "--locked", "--package", "pushpull", "--edges", "normal"])
            .args(["--prefix", "none", "--no-default-features", "--features", features])
            .args(net)
            .output()
            .unwrap()
    };
    let mut output = tree(&["--offline"]);
    if !output.status.success() {
        output = tree(&[]);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("failed to download") {
        return None;
    }
    assert!(output.status.success(), "{error}");
    let tree = String::from_utf8(output.stdout).unwrap();
    Some(tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect())
}

#[test]
fn a_program_compiles_the_crates_of_its_features_alone() {
    for (features, beside) in BESIDE {
        let Some(all) = compiled(features) else {
            println!("SKIPPED: the crates of the features {features:?} cannot be fetched");
            continue;
        };
        let ours = all.iter().map(String::as_str).filter(|name| name.starts_with("pushpull"));
        let expected = ALWAYS.iter().chain(*beside).copied();
        assert_eq!(ours.collect::<BTreeSet<_>>(), expected.collect(), "{features:?}");
        for (other, with) in OTHERS {
            assert_eq!(all.contains(*other), with.contains(features), "{other} with {features:?}");
        }
    }
}
