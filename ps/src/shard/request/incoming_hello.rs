//! [`IncomingHello`]: the hello of a new connection.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::access::Principal;
use pushpull_common::ids::TaskId;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{BodyCrc, Hello, Role};
use pushpull_common::protocol::refusal::Detail;

use crate::config::PsConfig;

/// A hello that has arrived on a new connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::shard) struct IncomingHello<'a> {
    pub(in crate::shard) connection: u64,
    pub(in crate::shard) hello: &'a Hello,
    pub(in crate::shard) origin: PeerOrigin,
    pub(in crate::shard) principal: Option<&'a Arc<Principal>>,
    pub(in crate::shard) now: Instant,
}

impl IncomingHello<'_> {
    /// Checks that the cluster has the task that says hello. A reader is not a task of the cluster.
    ///
    /// A task of the job `ps` does not train. One of another job that holds the variables may: its
    /// functions push gradients. That job has the listed tasks only, also in an elastic cluster.
    /// Functions train by a client of their own, which must be that of such a task.
    pub(in crate::shard) fn check_task(&self, config: &PsConfig) -> Result<(), Refusal> {
        let hello = self.hello;
        let client = TaskId::new(hello.job.as_str(), hello.task);
        let of_functions = client.of_functions();
        let job = of_functions.as_ref().map_or(&*client.job, |task| &*task.job);
        let cluster = &config.cluster;
        let ps_job = config.job();
        let unknown = |detail: String| {
            let job = hello.job.clone();
            let task = hello.task;
            let detail = Detail::clipped(detail);
            Err(Refusal::UnknownTask { job, task, detail })
        };
        let has = |job: &str| cluster.num_tasks(job).is_ok_and(|tasks| tasks > 0);
        match hello.role {
            Role::Chief {} if client == TaskId::declaring_client() => Ok(()),
            Role::Chief {} if of_functions.is_some() => {
                unknown("functions are never the chief".to_owned())
            }
            Role::Worker {} | Role::Chief {} if job == TaskId::PS_JOB => {
                unknown("a task of the job ps is not a worker".to_owned())
            }
            Role::Worker {} | Role::Chief {} => {
                let lists_workers = cluster.jobs().any(|job| job != ps_job && has(job));
                match cluster.require(job, hello.task) {
                    Ok(()) => Ok(()),
                    Err(error) if job == ps_job => unknown(error.to_string()),
                    Err(_) if !lists_workers => Ok(()),
                    Err(_) if config.elastic_workers && has(job) => Ok(()),
                    Err(error) => unknown(error.to_string()),
                }
            }
            Role::Peer {} if job != ps_job => {
                unknown(format!("a peer must be a task of the job {ps_job}"))
            }
            Role::Peer {} => match cluster.require(ps_job, hello.task) {
                Ok(()) => Ok(()),
                Err(error) => unknown(error.to_string()),
            },
            _ => Ok(()),
        }
    }

    /// Returns whether bodies have a checksum.
    pub(in crate::shard) fn has_crc(&self) -> bool {
        match self.hello.body_crc {
            BodyCrc::On {} => true,
            BodyCrc::Off {} => false,
            BodyCrc::Auto {} => self.origin == PeerOrigin::Remote,
        }
    }
}
