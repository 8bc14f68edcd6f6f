//! The files of `examples/deploy`: the commands of the Kubernetes manifests and of the Yarnfile train on
//! loopback, the manifests satisfy the schemas of their APIs, and the image trains in containers. And the
//! commands of the README train on two hosts, which are network namespaces.
//!
//! They need the programs of the image, which `.ci/run` builds; `PUSHPULL_STATIC` may name their
//! folder. Manifests are read by the virtual environment `target/kubernetes`, which `.ci/run` makes, and
//! containers run under podman, as root. The output names what is absent.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/case_counts.rs"]
mod case_counts;
mod containers;
#[path = "../support/hosts.rs"]
mod hosts;
mod kubernetes;
mod tasks;
mod two_hosts;
mod yarn;

use std::process::ExitCode;

use self::case_counts::CaseCounts;
use self::tasks::Programs;

/// The result of a case: a line about what has been seen, or the fault.
type Outcome = Result<String, String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut names = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    let is_wanted = names.peek().is_none() || names.any(|name| "deploy".contains(&name[..]));
    if !is_wanted || arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }

    let mut counts = CaseCounts::default();
    let programs = Programs::find();
    counts.count("the Yarnfile", yarn::check());
    counts.count("the environment of TonY", yarn::check_tony());
    match &programs {
        Ok(programs) => counts.count("the commands of the Yarnfile", yarn::train(programs)),
        Err(absent) => counts.skip("the commands of the Yarnfile", absent),
    }
    match kubernetes::Tools::find() {
        Ok(tools) => {
            counts.count("the manifests and their schemas", kubernetes::validate(&tools));
            counts.count("the runtime of Kubeflow Trainer", kubernetes::validate_runtime(&tools));
            counts.count("the names in the manifests", kubernetes::check_names(&tools));
            match &programs {
                Ok(programs) => {
                    let trained = kubernetes::train(&tools, programs);
                    counts.count("the commands of the manifests", trained);
                }
                Err(absent) => counts.skip("the commands of the manifests", absent),
            }
        }
        Err(absent) => counts.skip("the manifests", &absent),
    }
    match (&programs, &two_hosts::hosts()) {
        (Ok(programs), Ok(hosts)) => {
            counts.count("the README, on two hosts", two_hosts::check(programs, hosts));
        }
        (Err(absent), _) | (_, Err(absent)) => counts.skip("the README, on two hosts", absent),
    }
    match (programs, containers::Podman::find()) {
        (Ok(programs), Ok(podman)) => {
            for (name, outcome) in containers::check(&programs, &podman) {
                counts.count(name, outcome);
            }
        }
        (Err(absent), _) | (_, Err(absent)) => counts.skip("containers", &absent),
    }
    counts.finish("deploy")
}
