//! Pulling without taking part: for evaluation and serving.

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::protocol::message::Role;
use pushpull_common::tensor::Element;

use crate::client::Client;
use crate::config::WorkerConfig;
use crate::error::{Error, JoinError};
use crate::params::Params;
use crate::runtime::SessionRunner;
use crate::sharding_plan::ShardingPlan;

/// Pulls values without a token. It holds no lease, counts for nobody, and learns what the
/// variables are from the servers.
#[derive(Debug)]
pub struct Reader {
    client: Client,
    plan: Arc<ShardingPlan>,
}

impl Reader {
    /// Connects, and waits until the variables have values. The task of the configuration only
    /// names the reader; the cluster need not have it.
    pub async fn connect(config: WorkerConfig) -> Result<Reader, ReaderError> {
        let client = Client::connect(config, Role::Reader {}).await?;
        let timeout = client.config.connect_timeout;
        client.await_ready(client.owner, timeout).await.map_err(JoinError::from)?;
        let catalogue = client.fetch_catalogue(client.owner).await?;
        let plan = Arc::new(ShardingPlan::new(Arc::new(catalogue)));
        let (shards, _) = client.open(&plan).await.map_err(JoinError::from)?;
        client.await_values(&plan, &shards).await?;
        Ok(Reader { client, plan })
    }

    /// What runs its session.
    pub(crate) fn runner(&self) -> &Arc<SessionRunner> {
        self.client.caller.runner()
    }

    /// The variables and their places.
    pub fn catalogue(&self) -> &Catalogue {
        self.plan.catalogue()
    }

    /// Zeroed parameters to pull into.
    pub fn params(&self) -> Params {
        Params::new(self.plan.clone())
    }

    /// Replaces all of `params` by the servers' values; the global step they are at least of.
    ///
    /// In synchronous mode all values are of exactly that step: shards that have answered with those
    /// of an older one are asked again. If they do not agree before the deadline, the error names
    /// those that are behind.
    ///
    /// Values of before and after a restore are never mixed: while servers are restored this waits,
    /// also for one that has come back without its values. The step may then be lower than that of
    /// an earlier pull.
    ///
    /// On an error, or if the future is dropped, `params` is as it was.
    pub async fn pull(&mut self, params: &mut Params) -> Result<u64, Error> {
        if !self.plan.is_same(&params.plan) {
            return Err(Error::ForeignBuffer);
        }
        Ok(self.client.pull(params).await?.0)
    }

    /// Pulls rows of a sparse variable into `rows`, one behind the other in the order of `ids`; the
    /// global step they are at least of. As [`crate::Worker::pull_rows`] without a token.
    pub async fn pull_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<u64, Error> {
        let read = self.client.pull_rows(&self.plan, name, ids, rows, None).await?;
        read.map(|read| read.step.0).ok_or(Error::Ended { doing: "pull rows" })
    }
}

/// Why a reader could not connect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReaderError {
    /// The servers could not be reached.
    #[error(transparent)]
    Connect(#[from] crate::error::ConnectError),
    /// The variables could not be learned.
    #[error(transparent)]
    Join(#[from] JoinError),
}
