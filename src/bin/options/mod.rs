//! The flags of classic trainers, for the daemon and the examples: the tasks of the cluster, the
//! launcher or the rendezvous that tells them, the update mode, job files, spellings with underscores,
//! values with hyphens, and the signals and parents that end them.

#![allow(dead_code, unused_imports, reason = "each program uses a part")]

mod cluster_meeting;
mod end_signals;
mod exit_with_parent;
mod file_size_signal;
mod hyphens;
mod job_options;
mod local_path;
mod mode_options;
mod resolve_options;
mod security_options;
mod task_options;
mod underscores;

pub(crate) use cluster_meeting::{ClusterMeeting, MeetingAccess, MeetingError};
pub(crate) use end_signals::EndSignals;
pub(crate) use exit_with_parent::ExitWithParent;
pub(crate) use file_size_signal::fail_writes_instead;
pub(crate) use hyphens::takes_hyphen;
pub(crate) use job_options::{JobLine, JobOptions};
pub(crate) use local_path::local_path;
pub(crate) use mode_options::ModeOptions;
pub(crate) use pushpull::job::{Replicas, listed_workers, parse_byte_size};
pub(crate) use resolve_options::{
    JoinAccess, Joined, Joining, ResolveFault, ResolveOptions, needs_launcher,
};
pub(crate) use security_options::SecurityOptions;
pub(crate) use task_options::TaskOptions;
pub(crate) use underscores::accepts_underscores;
