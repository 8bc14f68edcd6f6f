//! The values that a replica changes by itself: averages, and the chief's values for the servers.

use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::Operation;
use pushpull_common::variable::Replication;
#[cfg(doc)]
use pushpull_common::variable::VariableSpec;

use super::Worker;
use crate::error::Error;
use crate::gradients::packed_variables::PackedVariables;
use crate::gradients::params::Params;
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::joined_model::check_finite;
use crate::pull_client::PullCall;
use crate::session::{PushOrder, ReadPoint};

/// The most variables that are pulled at once after an average.
const PULLS_AT_ONCE: usize = 16;

impl Worker {
    /// Averages the variables that are due after `steps` steps of this replica: each
    /// [`VariableSpec::mean_every_steps`] whose interval divides `steps`. Call it after each step,
    /// with the number of steps that this worker has made.
    ///
    /// The replica adds its share of what it has changed since its last average, divided by the
    /// number of replicas in the cluster, to the servers' values. Then it takes the servers'
    /// values. The replicas of a cluster are the tasks of its jobs `chief` and `worker`. The
    /// servers' values move towards the mean of the replicas' values, and reach it once these no
    /// longer change.
    ///
    /// Each change of a value is added at most once. Dropping the future, or an error, leaves a
    /// contribution that was sent: it completes in the background, or is withdrawn if no shard can
    /// have received its share in full. The next average adds only what has changed since. After an
    /// error, call again with the same number to take the servers' values.
    ///
    /// Cost: nothing unless a variable is due. Then one push of the variables that are due to the
    /// shards that hold them, and after it one pull of each.
    ///
    /// # Errors
    /// [`Error::NonFinite`] by the servers' policy, if a value of the replica is NaN or infinite.
    /// Nothing was sent then. [`Error::ForeignBuffer`], and those of [`Worker::assign_add`].
    pub async fn average(&mut self, params: &mut Params, steps: u64) -> Result<(), Error> {
        let plan = self.plan_of("average", params)?;
        let Some(means) = self.means.as_mut() else { return Ok(()) };
        let due = means.due(steps);
        if due.is_empty() {
            return Ok(());
        }
        let policy = self.client.settings.non_finite;
        for &id in &due {
            check_finite(policy, &plan, id, means.contribute(&plan, id, &params.buffer), 1.0)?;
        }
        let parts = Scatter::new(&plan, due.iter().copied()).parts(|range| means.body(&range));
        due.iter().for_each(|&id| means.rebase(&plan, id, &params.buffer));
        if !parts.is_empty() {
            let operation = Operation::AssignAdd {};
            let order = PushOrder::of_parts(operation, None, ReadPoint::default(), parts);
            self.assign_order(order, &plan).await?;
        }
        for variables in due.chunks(PULLS_AT_ONCE) {
            self.take_means(&plan, variables, params).await?;
        }
        Ok(())
    }

    /// Replaces the replica's values of means by those of the servers.
    async fn take_means(
        &mut self,
        plan: &Arc<ShardingPlan>,
        variables: &[VariableId],
        params: &mut Params,
    ) -> Result<(), Error> {
        let start = |&id| (id, self.client.pulls.start_variable(plan, id, None));
        let pulls: Vec<(VariableId, PullCall)> = variables.iter().map(start).collect();
        for (id, mut pull) in pulls {
            let values = &mut params.buffer.bytes_mut()[plan.range(id)];
            let read = poll_fn(|context| pull.poll_copied(context, values)).await?;
            read.ok_or(Error::Ended { doing: "average" })?;
            if let Some(means) = &mut self.means {
                means.rebase(plan, id, &params.buffer);
            }
        }
        Ok(())
    }

    /// Gives the servers this replica's values of all [`VariableSpec::local`] variables, exactly
    /// once. Only the chief may call it, for example before it saves a checkpoint.
    ///
    /// Needs no token and does not advance the global step. Checkpoints and readers have these
    /// values once this returns. The variables of one shard change together.
    ///
    /// Cost: one push of these variables; nothing if there are none.
    ///
    /// Dropping the future has the effect of dropping that of [`Worker::assign`].
    ///
    /// # Errors
    /// [`Error::NotChief`], [`Error::ForeignBuffer`], and those of [`Worker::assign`].
    pub async fn publish(&mut self, params: &Params) -> Result<(), Error> {
        let plan = self.plan_of("publish", params)?;
        if !self.is_chief() {
            let task = self.client.config.task.clone();
            return Err(Error::NotChief { doing: "publish", task });
        }
        let packed = PackedVariables::new(&plan, |it| it.replication() == Replication::Local);
        let policy = self.client.settings.non_finite;
        for id in packed.ids() {
            check_finite(policy, &plan, id, &params.buffer.bytes()[plan.range(id)], 1.0)?;
        }
        // The padding of pulled values is undefined; that of a push is zeros.
        let mut values = packed.buffer();
        packed.pack(&params.buffer, &mut values);
        let parts = Scatter::new(&plan, packed.ids())
            .parts(|range| Bytes::copy_from_slice(&values.bytes()[packed.locate(&range)]));
        if parts.is_empty() {
            return Ok(());
        }
        let order = PushOrder::of_parts(Operation::Assign {}, None, ReadPoint::default(), parts);
        self.assign_order(order, &plan).await.map(|_| ())
    }

    /// Returns the plan, if these values are of this worker's variables.
    fn plan_of(&self, doing: &'static str, params: &Params) -> Result<Arc<ShardingPlan>, Error> {
        let plan = &self.model(doing)?.plan;
        match plan.is_same(&params.plan) {
            true => Ok(plan.clone()),
            false => Err(Error::ForeignBuffer),
        }
    }
}
