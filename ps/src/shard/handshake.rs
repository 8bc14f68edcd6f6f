//! The handshake: checks a peer's hello, and admits or refuses the peer.

use std::time::Instant;

use pushpull_common::codec::Encodings;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{RestoreEpoch, TaskId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::{BodyCrc, Hello, ModeIs, NonFinitePolicy, Role, Welcome};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Header, Refusal, version};

use super::client_registry::AdmittedClient;
use super::{ConnectionState, Shard, answer_to};
use crate::config::Mode;
use crate::config::NonFinite;

/// The job of the parameter servers.
const PS: &str = "ps";

/// Where a peer connects from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerOrigin {
    /// Possibly another host.
    Remote,
    /// This host, over TCP.
    Loopback,
    /// This host, over a Unix socket, which can pass descriptors.
    Unix {
        /// Whether the peer has the same user id as this process.
        same_user: bool,
    },
}

impl Shard {
    pub(super) fn connected(
        &mut self,
        now: Instant,
        connection: u64,
        hello: &Hello,
        header: &Header,
        origin: PeerOrigin,
    ) {
        match self.admit(now, connection, hello, origin) {
            Ok(welcome) => self.out.answer(connection, answer_to(header), welcome.into()),
            Err(refusal) => {
                self.out.refuse(connection, answer_to(header), refusal);
                self.out.close(connection);
            }
        }
    }

    fn admit(
        &mut self,
        now: Instant,
        connection: u64,
        hello: &Hello,
        origin: PeerOrigin,
    ) -> Result<Welcome, Refusal> {
        let version = version::agree(hello.version_oldest, hello.version_newest)
            .ok_or(Refusal::Version { oldest: version::OLDEST, newest: version::NEWEST })?;
        if hello.shard != self.id {
            let (task, shards) = (self.id.task, self.config.shards);
            return Err(Refusal::WrongShard { wanted: hello.shard, task, shards });
        }
        if let Some(refusal) = self.identity.refusal(&Identity::from_wire(&hello.identity)) {
            return Err(refusal);
        }
        self.check_task(hello)?;
        if let (Some(client), Some(store)) = (hello.catalogue, self.variables.store())
            && client != store.catalogue().digest()
        {
            let server = store.catalogue().digest();
            let differs =
                Detail::clipped("the variables were declared again since this client joined");
            return Err(Refusal::Catalogue { server, client, differs });
        }
        if self.checkpoints.restoring.is_some() && hello.seen_epoch != RestoreEpoch(0) {
            // The client reconnects in the next epoch, and then learns how far it was rolled back.
            let what = Detail::clipped("restores under way");
            return Err(Refusal::Busy { what, limit: 1 });
        }
        let limit = self.config.network.connections_max;
        if self.peers.connections.len() >= limit {
            let what = Detail::clipped("connections");
            return Err(Refusal::Busy { what, limit: limit as u64 });
        }
        let (client, client_epoch) = match hello.role {
            Role::Worker {} | Role::Chief {} => {
                let admitted = self.admit_client(now, connection, hello)?;
                (Some(admitted.key), admitted.epoch)
            }
            Role::Reader {} | Role::Peer {} => (None, hello.client_epoch),
            role => {
                return Err(Refusal::Role { role: role.code(), kind: 1 });
            }
        };
        let crc = match hello.body_crc {
            BodyCrc::On {} => true,
            BodyCrc::Off {} => false,
            BodyCrc::Auto {} => origin == PeerOrigin::Remote,
        };
        let role = hello.role;
        let (expected_body, refused) = (None, None);
        let state =
            ConnectionState { role, client, origin, shared: 0, crc, expected_body, refused };
        self.peers.connections.insert(connection, state);
        Ok(Welcome {
            version,
            shards: self.config.shards,
            client_epoch,
            mode: match &self.config.mode {
                Mode::Asynchronous(mode) => {
                    ModeIs::Asynchronous { owner_first: mode.reject_older.is_some() }
                }
                Mode::Synchronous(mode) => ModeIs::Synchronous {
                    replicas_to_aggregate: mode.replicas_to_aggregate,
                    total_num_replicas: mode.total_num_replicas,
                },
            },
            lease_ms: u32::try_from(self.config.lease.as_millis()).unwrap_or(u32::MAX),
            part_bytes_max: PART_BYTES_MAX as u32,
            body_crc: if crc { BodyCrc::On {} } else { BodyCrc::Off {} },
            non_finite: match self.config.non_finite {
                NonFinite::Reject => NonFinitePolicy::Reject {},
                NonFinite::Count => NonFinitePolicy::Count {},
                NonFinite::Allow => NonFinitePolicy::Allow {},
            },
            encodings: Encodings::all(),
            catalogue: self.variables.catalogue_state(),
            restore_epoch: self.variables.epoch,
            restored_step: self.variables.restored_step,
            unix_address: Text::clipped(&self.config.unix_address),
            identity: self.identity.to_wire(),
            auth: List::default(),
        })
    }

    /// Checks that the cluster has the task that says hello. A reader is not a task of the cluster.
    fn check_task(&self, hello: &Hello) -> Result<(), Refusal> {
        let (cluster, job) = (&self.config.cluster, hello.job.as_str());
        let unknown = |detail: String| {
            let (job, task, detail) = (hello.job.clone(), hello.task, Detail::clipped(detail));
            Err(Refusal::UnknownTask { job, task, detail })
        };
        let has = |job: &str| cluster.num_tasks(job).is_ok_and(|tasks| tasks > 0);
        match hello.role {
            Role::Worker {} | Role::Chief {} if job == PS => {
                unknown("a task of the job ps is not a worker".to_owned())
            }
            Role::Worker {} | Role::Chief {} => {
                let lists_workers = cluster.jobs().any(|job| job != PS && has(job));
                match cluster.task_address(job, hello.task) {
                    Ok(_) => Ok(()),
                    Err(_) if !lists_workers => Ok(()),
                    Err(_) if self.config.elastic_workers && has(job) => Ok(()),
                    Err(error) => unknown(error.to_string()),
                }
            }
            Role::Peer {} if job != PS => unknown("a peer must be a task of the job ps".to_owned()),
            Role::Peer {} => match cluster.task_address(PS, hello.task) {
                Ok(_) => Ok(()),
                Err(error) => unknown(error.to_string()),
            },
            _ => Ok(()),
        }
    }

    fn admit_client(
        &mut self,
        now: Instant,
        connection: u64,
        hello: &Hello,
    ) -> Result<AdmittedClient, Refusal> {
        // The client's values are of another restore epoch, or this shard has lost the values that
        // the client knew.
        if hello.seen_epoch != RestoreEpoch(0) && hello.seen_epoch != self.variables.epoch {
            return Err(self.variables.other_epoch(hello.seen_epoch));
        }
        let task = TaskId::new(hello.job.as_str(), hello.task);
        self.peers.check_chief(&self.steps, now, hello, &task)?;
        self.files
            .reserve_client(&self.peers)
            .map_err(|error| Refusal::Storage { detail: Detail::clipped(error.to_string()) })?;
        let mint = self.steps.owner.is_some();
        let (incarnation, epoch) = (hello.incarnation, hello.client_epoch);
        let admitted =
            self.peers.registry.admit(&task, incarnation, epoch, mint, connection, now)?;
        if let Some(replaced) = admitted.replaced.filter(|&old| old != connection) {
            self.out.close(replaced);
            self.intake.drop_client_connection(&mut self.peers, replaced, admitted.key);
        }
        if admitted.fenced {
            if let Some(inbox) = &mut self.intake.inbox {
                inbox.orphan_whole(admitted.key);
            }
            self.drop_client(now, admitted.key, true);
        }
        if hello.role == (Role::Chief {}) {
            self.chief_joined(admitted.key, admitted.epoch);
        }
        self.steps.replica_joins(&self.peers, now, admitted.key);
        Ok(admitted)
    }
}
