//! Real processes: the daemon, the tool and the examples, and clients in other languages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(clippy::duplicate_mod, reason = "two examples include the same options")]

mod bench;
mod clients;
mod daemon;
mod devices;
mod example_coordinator;
mod example_in_graph;
mod exit_with_parent;
mod help;
mod inspect;
mod job_file;
mod jobs;
mod launch;
#[path = "../support/parent_process.rs"]
mod parent_process;
mod rendezvous;
mod resolve;
mod security;
mod tensorboard;
#[path = "../support/test_process.rs"]
mod test_process;
mod training;
