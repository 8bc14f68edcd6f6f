//! Declaring the variables and giving them their first values.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::message::{CatalogueIs, Declared, Ready};
use pushpull_common::protocol::{Envelope, Refusal};

use super::output::Body;
use super::parked::{Entry, Wait};
use super::work::Job;
use super::{Detail, Shard, Variables};
use crate::aggregate::step_owner::StepOwner;
use crate::arena::fence;
use crate::error::StorageError;
use crate::optimizer::Untrainable;
use crate::store::Store;

impl Shard {
    pub(super) fn declare(
        &mut self,
        connection: u64,
        request: Envelope,
        digest: [u8; 32],
        bytes: &[u8],
    ) {
        match self.try_declare(digest, bytes) {
            Ok(()) => {
                let state = self.catalogue_state();
                let restore_epoch = self.epoch;
                let trained = self.owner.as_ref().is_some_and(StepOwner::has_trained);
                let declared = Declared { state, restore_epoch, trained };
                self.answer(connection, request, declared.into());
            }
            Err(refusal) => self.refuse(connection, request, refusal),
        }
    }

    fn try_declare(&mut self, client: [u8; 32], bytes: &[u8]) -> Result<(), Refusal> {
        if self.restoring.is_some() {
            // Whoever declares waits until the restore that another has asked for is over.
            return Err(Refusal::NotInitialized {});
        }
        let current = self.store().map(|store| store.catalogue().clone());
        if current.as_ref().is_some_and(|current| current.digest() == client) {
            return Ok(());
        }
        let refuse = |server, differs: String| {
            Err(Refusal::Catalogue { server, client, differs: Detail::clipped(differs) })
        };
        let server = current.as_ref().map_or([0; 32], |current| current.digest());
        let catalogue = match Catalogue::decode(bytes) {
            Ok(catalogue) if catalogue.digest() == client => catalogue,
            Ok(_) => return refuse(server, "the digest is not that of the catalogue".into()),
            Err(error) => return refuse(server, error.to_string()),
        };
        if let Some(current) = current
            && (self.is_ready() || !self.jobs.is_empty())
        {
            let differs = current.difference(&catalogue);
            return refuse(server, differs.unwrap_or_else(|| "their placement differs".into()));
        }
        for shard in catalogue.shards() {
            let task = self.config.cluster.task_address("ps", shard.task);
            if task.is_err() || shard.shard >= self.config.shards {
                return refuse(
                    server,
                    format!("it places variables on {shard}, which is not there"),
                );
            }
        }
        self.can_train(&catalogue).map_err(|Untrainable { variable, reason }| {
            Refusal::Untrainable {
                variable: Detail::clipped(variable),
                detail: Detail::clipped(reason),
            }
        })?;
        self.reserve_memory(Arc::new(catalogue)).map_err(|error| match error {
            StorageError::DoesNotFit { need, limit } => Refusal::DoesNotFit { need, limit },
            error => Refusal::Storage { detail: Detail::clipped(error.to_string()) },
        })
    }

    fn reserve_memory(&mut self, catalogue: Arc<Catalogue>) -> Result<(), StorageError> {
        // All at once, so that a refusal names all that the shard needs; and before anything is
        // given up, so that it changes nothing.
        let need = self.need(&catalogue);
        let limit = self.budget.left() + self.store().map_or(0, Store::reserved);
        if need > limit {
            return Err(StorageError::DoesNotFit { need, limit });
        }
        // What an earlier declaration reserved is given back first: both may not fit.
        self.forget_variables()?;
        self.make_variables(catalogue)
    }

    /// Whether the initial values are being computed.
    pub(super) fn is_initializing(&self) -> bool {
        self.jobs.iter().any(|job| matches!(job, Job::Initialize(_)))
    }

    pub(super) fn initialize(
        &mut self,
        now: Instant,
        connection: u64,
        request: Envelope,
        epoch: RestoreEpoch,
    ) {
        match &self.variables {
            Variables::Absent => self.refuse(connection, request, Refusal::NotInitialized {}),
            Variables::Ready(_) => self.answer_ready(connection, request),
            Variables::Declared(_) => {
                // Asked twice, by a chief that has reconnected: one initialization, and the
                // second request waits for it.
                if self.is_initializing() {
                    return self.park(Entry::plain(connection, request, now, Wait::Ready));
                }
                if epoch <= self.epoch || epoch.0 == u32::MAX {
                    let refusal = self.other_epoch(epoch);
                    return self.refuse(connection, request, refusal);
                }
                self.jobs.push_back(Job::initialize(connection, request, epoch));
            }
        }
    }

    /// The initial values are there.
    pub(super) fn initialized(&mut self, connection: u64, request: Envelope, epoch: RestoreEpoch) {
        match std::mem::replace(&mut self.variables, Variables::Absent) {
            Variables::Declared(store) => {
                if store.has_integrity() {
                    store.seal(&mut self.journal);
                }
                fence();
                (self.epoch, self.restored_step) = (epoch, self.step());
                self.variables = Variables::Ready(store);
            }
            other => self.variables = other,
        }
        self.ready_now(connection, request);
    }

    /// Answers all who wait for the variables to have values.
    pub(super) fn ready_now(&mut self, connection: u64, request: Envelope) {
        self.answer_ready(connection, request);
        for entry in self.parked.take(|entry| matches!(entry.wait, Wait::Ready)) {
            self.answer_ready(entry.connection, entry.request);
        }
    }

    pub(super) fn wait(&mut self, entry: Entry) {
        match self.is_ready() {
            true => self.answer_ready(entry.connection, entry.request),
            false => self.park(entry),
        }
    }

    pub(super) fn answer_ready(&mut self, connection: u64, request: Envelope) {
        let digest = self.store().map_or([0; 32], |store| store.catalogue().digest());
        self.answer(connection, request, Ready { digest }.into());
    }

    pub(super) fn send_catalogue(&mut self, connection: u64, request: Envelope) {
        let Some(store) = self.store() else {
            return self.refuse(connection, request, Refusal::NotInitialized {});
        };
        let digest = store.catalogue().digest();
        let body = Bytes::from_owner(Encoded(store.catalogue().clone()));
        let body = Body::Shared(body);
        self.answer_with(connection, request, CatalogueIs { digest }.into(), body, None);
    }
}

/// A catalogue's bytes, shared by all answers that carry them.
struct Encoded(Arc<Catalogue>);

impl AsRef<[u8]> for Encoded {
    fn as_ref(&self) -> &[u8] {
        self.0.encode()
    }
}
