//! [`declare`]: declares variables for a client of functions.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Role;
use pushpull_common::variable::VariableSpec;

use crate::client::{Deadline, SessionClient};
use crate::config::WorkerConfig;
use crate::error::Error;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::initial_values::{InitialTensors, InitialValues};
use crate::joining::place;
use crate::worker::Worker;

/// The time for which a client waits for the values of another that has displaced it.
const YIELD_TIMEOUT: Duration = Duration::from_secs(1);

/// The shortest wait of a request for values: zero would be no limit.
const NO_WAIT: Duration = Duration::from_millis(1);

/// Declares variables and gives them values, unless the servers have both.
///
/// The configuration names the client ([`pushpull_common::ids::TaskId::declaring_client`]).
///
/// A client that finds them declared is a reader, and displaces no chief. One that declares them is
/// a chief of its own name. If several declare at once, the last displaces the others, which wait
/// for its values.
pub async fn declare<F: FnOnce(&mut InitialValues<'_>)>(
    config: WorkerConfig,
    variables: &[VariableSpec],
    fill: F,
) -> Result<(), Error> {
    let deadline = Deadline::after(config.connect_timeout);
    let reader = SessionClient::connect(config.clone(), Role::Reader {}).await?;
    let (_, catalogue) = place(&reader, variables)?;
    let plan = ShardingPlan::new(Arc::new(catalogue));
    let (shards, _) = reader.open(&plan).await?;
    let mut fill = FirstValues::Closure(fill);
    let mut wait = NO_WAIT;
    while !have_values(&reader, &plan, &shards, wait).await? {
        match join_as_chief(config.clone(), variables, &mut fill).await {
            Err(Error::Fenced) if !deadline.has_passed() => wait = YIELD_TIMEOUT,
            joined => return joined,
        }
    }
    Ok(())
}

/// The first values that the caller sets. A chief that another displaces while it fills them joins
/// again, and the closure runs once.
enum FirstValues<F> {
    /// The closure has not run.
    Closure(F),
    /// The values that the closure has set, for every further attempt.
    Filled(InitialTensors),
}

impl<F: FnOnce(&mut InitialValues<'_>)> FirstValues<F> {
    /// Sets the values of an attempt.
    fn fill(&mut self, values: &mut InitialValues<'_>) {
        match std::mem::replace(self, FirstValues::Filled(InitialTensors::default())) {
            FirstValues::Closure(fill) => fill(values),
            FirstValues::Filled(filled) => values.set_tensors(filled),
        }
        *self = FirstValues::Filled(values.tensors().clone());
    }
}

async fn join_as_chief<F: FnOnce(&mut InitialValues<'_>)>(
    config: WorkerConfig,
    variables: &[VariableSpec],
    fill: &mut FirstValues<F>,
) -> Result<(), Error> {
    let mut chief = Worker::connect_client(config).await?;
    let _ = chief.join(variables, |values: &mut InitialValues<'_>| fill.fill(values)).await?;
    chief.leave().await
}

/// Returns whether all shards of a plan have values of its variables, or have them after a wait.
async fn have_values(
    reader: &SessionClient,
    plan: &ShardingPlan,
    shards: &[ShardId],
    wait: Duration,
) -> Result<bool, Error> {
    for &shard in shards {
        match reader.ready_within(shard, wait).await {
            Ok(digest) if digest == plan.catalogue().digest() => {}
            Ok(_) => return Err(reader.differs(plan, shard).await?),
            Err(Error::Refused { refusal: Refusal::Deadline { .. }, .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
