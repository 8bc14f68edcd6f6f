//! Pulls without training, for evaluation and serving.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::CoordinatorEpoch;
use pushpull_common::protocol::message::{EndReason, Role};
use pushpull_common::tensor::Element;

use crate::client::SessionClient;
use crate::config::WorkerConfig;
use crate::coordinators::OpenedCoordinator;
use crate::error::{Error, ViewError};
use crate::gradients::params::{Gradients, Params};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::pull_client::ReplicaValues;
use crate::runtime::SessionRunner;

/// The wait of a client until it is connected, in words.
pub const SERVERS: &str = "a connection to the step owner";

/// The wait of a client until it can use the variables, in words.
pub const VALUES: &str = "a chief to declare the variables and give them values";

/// Pulls values without a token. A reader holds no lease, does not count as a replica, and fetches
/// the catalogue from the servers.
#[derive(Debug)]
pub struct Reader {
    client: SessionClient,
    plan: Arc<ShardingPlan>,
}

impl Reader {
    /// Connects, and waits until the variables have values, for at most
    /// [`WorkerConfig::connect_timeout`]. The task of the configuration only names the reader; the
    /// cluster need not contain it.
    ///
    /// Dropping the future ends the session.
    pub async fn connect(config: WorkerConfig) -> Result<Reader, Error> {
        Reader::connect_in_phases(config, |_| ()).await
    }

    /// Connects as [`Reader::connect`] does, and tells `waits` what it waits for next.
    #[doc(hidden)]
    pub async fn connect_in_phases(
        config: WorkerConfig,
        waits: impl Fn(&'static str),
    ) -> Result<Reader, Error> {
        waits(SERVERS);
        let client = SessionClient::connect(config, Role::Reader {}).await?;
        let timeout = client.config.connect_timeout;
        waits(VALUES);
        client.await_ready(client.owner, timeout).await?;
        let catalogue = client.fetch_catalogue(client.owner).await?;
        let plan = Arc::new(ShardingPlan::new(Arc::new(catalogue)));
        let (shards, _) = client.open(&plan).await?;
        client.await_values(&plan, &shards).await?;
        Ok(Reader { client, plan })
    }

    /// The runner of its session.
    pub(crate) fn runner(&self) -> &Arc<SessionRunner> {
        self.client.caller.runner()
    }

    /// Whether its session has failed, so that every operation fails.
    #[doc(hidden)]
    pub fn has_failed(&self) -> bool {
        self.client.caller.has_failed()
    }

    /// The variables with their partitions, offsets and digest.
    pub fn catalogue(&self) -> &Catalogue {
        self.plan.catalogue()
    }

    /// Returns zeroed parameters to pull into.
    pub fn params(&self) -> Params {
        Params::new(self.plan.clone())
    }

    /// Replaces all of `params` with the servers' values, and returns the global step that they are
    /// at least of.
    ///
    /// In synchronous mode all values are of exactly that step: shards that answered with an older
    /// step are asked again. If the shards do not agree before the deadline, the error names those
    /// that are behind.
    ///
    /// Values from before and after a restore are never mixed. While servers are being restored
    /// this waits, also for one that has restarted without values. After a restore the step may be
    /// lower than that of an earlier pull.
    ///
    /// On an error, or if the future is dropped, `params` is unchanged, unless pulls are in place
    /// ([`WorkerConfig::in_place_pulls`]).
    ///
    /// # Errors
    /// [`Error::ForeignBuffer`] if `params` is of another model, [`Error::Timeout`], and those of
    /// the session.
    pub async fn pull(&mut self, params: &mut Params) -> Result<u64, Error> {
        if !self.plan.is_same(&params.plan) {
            return Err(Error::ForeignBuffer);
        }
        Ok(self.client.pulls.newest(params, ReplicaValues::Replace).await?.0)
    }

    /// Pulls as [`Reader::pull`] does, for several callers at once.
    #[doc(hidden)]
    pub async fn pull_shared(&self, params: &mut Params) -> Result<(), Error> {
        self.client.pulls.newest(params, ReplicaValues::Replace).await.map(|_| ())
    }

    /// Whether values are of this reader's variables, and so of no other reader.
    #[doc(hidden)]
    pub fn has_made(&self, params: &Params) -> bool {
        Arc::ptr_eq(&params.plan, &self.plan)
    }

    /// Returns an empty set of gradients in memory that becomes bytes without a copy.
    #[doc(hidden)]
    pub fn gradients_for_bytes(&self) -> Gradients {
        Gradients::for_bytes(&self.plan)
    }

    /// Replaces `values`, which must have the length of a dense variable, with its newest values.
    ///
    /// Cost: one request to each shard that holds part of the variable, and a copy of the values.
    pub async fn pull_variable<T: Element>(
        &self,
        name: &str,
        values: &mut [T],
    ) -> Result<(), Error> {
        let (id, range) = self.plan.locate::<T>(name)?;
        if range.len() != size_of_val(values) {
            let shape = self.plan.catalogue().variable(id).shape().to_string();
            let name = name.to_owned();
            let elements = values.len();
            return Err(ViewError::Length { name, elements, shape }.into());
        }
        let values: &mut [u8] = bytemuck::cast_slice_mut(values);
        let mut call = self.client.pulls.start_variable(&self.plan, id, None);
        poll_fn(|context| call.poll_copied(context, values)).await?;
        Ok(())
    }

    /// Opens a coordinator: see [`crate::Worker::open_coordinator`].
    ///
    /// # Errors
    /// Those of [`crate::Worker::open_coordinator`].
    pub async fn open_coordinator(&self, name: &str) -> Result<OpenedCoordinator, Error> {
        self.client.open_coordinator(&self.plan, name).await
    }

    /// Returns a coordinator with the effects that have settled by now: see
    /// [`crate::Worker::settled_effects`].
    ///
    /// # Errors
    /// Those of [`crate::Worker::settled_effects`].
    pub async fn settled_effects(&self, name: &str) -> Result<OpenedCoordinator, Error> {
        self.client.settled_effects(&self.plan, name).await
    }

    /// Closes a coordinator: see [`crate::Worker::close_coordinator`].
    ///
    /// # Errors
    /// Those of [`crate::Worker::close_coordinator`].
    pub async fn close_coordinator(
        &self,
        name: &str,
        epoch: CoordinatorEpoch,
    ) -> Result<(), Error> {
        self.client.close_coordinator(&self.plan, name, epoch).await
    }

    /// Waits until the training has ended on all workers, for at most `within`, and returns why.
    /// `None` if it goes on. The values that are pulled after that are final.
    ///
    /// Zero asks without a wait. The answer takes up to 50 ms while the training goes on.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the step owner does not answer within [`WorkerConfig::timeout`] after
    /// that, [`Error::ServerStopped`], and those of the session.
    pub async fn training_end(&mut self, within: Duration) -> Result<Option<EndReason>, Error> {
        self.client.await_end(within).await
    }

    /// Pulls rows of a sparse variable into `rows`, back to back in the order of `ids`, and returns
    /// the global step that they are at least of. Otherwise like [`crate::Worker::pull_rows`].
    pub async fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<u64, Error> {
        let read = self.client.pulls.rows(&self.plan, name, ids, rows, None).await?;
        read.map(|read| read.step.0).ok_or(Error::Ended { doing: "pull rows" })
    }
}
