//! Assignments: values that do not come from the optimizer.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::Element;

use super::{PushHandle, Worker};
use crate::client::SessionClient;
use crate::error::{Error, ViewError};
use crate::gradients::row_ids;
use crate::gradients::rows::RowPartOptions;
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::gradients::staged_parts::StagedParts;
use crate::initial_values::{RowPiece, padded_bytes};
use crate::joined_model::{check_finite, check_rows_finite};
use crate::session::{PushOrder, ReadPoint, SessionCommand};

impl Worker {
    /// Overwrites a dense variable, trained or plain, exactly once. `values` has all its elements,
    /// in row-major order.
    ///
    /// Needs no token and does not advance the global step. Returns once every shard that holds
    /// part of the variable has stored the values; other workers may pull a mixture of old and new
    /// partitions before that.
    ///
    /// Dropping the future withdraws the assignment if no shard can have received its share in
    /// full; otherwise it completes in the background.
    ///
    /// # Errors
    /// [`Error::View`] if the variable, the type or the length is wrong, [`Error::NonFinite`] by
    /// the servers' policy, and those of [`Worker::push`].
    pub async fn assign<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        let plan = self.model("assign")?.plan.clone();
        let (id, bytes) = padded_bytes(&plan, name, values)?;
        self.assign_bytes(&plan, id, bytes, Operation::Assign {}, plan.shards()).await
    }

    /// Adds to a plain variable, exactly once. Integers wrap. Otherwise like [`Worker::assign`].
    ///
    /// # Errors
    /// Those of [`Worker::assign`]; [`ViewError::Trainable`] if the optimizer trains the variable.
    pub async fn assign_add<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        let plan = self.model("add")?.plan.clone();
        let (id, bytes) = padded_bytes(&plan, name, values)?;
        if plan.catalogue().variable(id).is_trainable() {
            return Err(ViewError::Trainable { name: name.to_owned() }.into());
        }
        self.assign_bytes(&plan, id, bytes, Operation::AssignAdd {}, plan.shards()).await
    }

    /// Overwrites rows of a sparse variable or a table, exactly once. `rows` holds the rows back to
    /// back, in the order of `ids`. Otherwise like [`Worker::assign`].
    ///
    /// # Errors
    /// Those of [`Worker::assign`]; [`ViewError::RowTwice`] if an id occurs twice,
    /// [`Error::TableFull`] if a table has no space for a new row.
    pub async fn assign_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        let plan = self.model("assign rows")?.plan.clone();
        let variable = row_ids::check::<T>(&plan, name, ids, rows.len())?;
        if let Some((row, place)) = row_ids::first_duplicate(ids) {
            return Err(ViewError::RowTwice { name: name.to_owned(), row, place }.into());
        }
        let mut staged = StagedParts::default();
        staged.rows.set(&plan, variable, ids, rows)?;
        self.assign_staged(&plan, variable, staged).await
    }

    /// Overwrites rows that were read from a file, which are valid and have unique ids.
    pub(crate) async fn assign_piece(
        &self,
        plan: &Arc<ShardingPlan>,
        variable: VariableId,
        rows: &RowPiece,
    ) -> Result<(), Error> {
        let mut staged = StagedParts::default();
        staged.rows.set_bytes(plan, variable, &rows.ids, &rows.values)?;
        self.assign_staged(plan, variable, staged).await
    }

    async fn assign_staged(
        &self,
        plan: &Arc<ShardingPlan>,
        variable: VariableId,
        mut staged: StagedParts,
    ) -> Result<(), Error> {
        for rows in staged.rows.iter() {
            check_rows_finite(self.client.settings.non_finite, plan, rows, 1.0)?;
        }
        staged.rows.cut(
            plan,
            variable,
            RowPartOptions { include_empty: false, include_values: true, factor: 1.0 },
        );
        if staged.is_empty() {
            return Ok(());
        }
        let operation = Operation::Assign {};
        let staged = Some(Arc::new(staged));
        let order = PushOrder::of_parts(operation, None, ReadPoint::default(), Vec::new());
        let order = PushOrder { staged, ..order };
        self.assign_order(order, plan).await.map(|_| ())
    }

    pub(crate) async fn assign_bytes(
        &self,
        plan: &Arc<ShardingPlan>,
        id: VariableId,
        bytes: Bytes,
        operation: Operation,
        shards: &[ShardId],
    ) -> Result<(), Error> {
        check_finite(self.client.settings.non_finite, plan, id, &bytes, 1.0)?;
        let start = plan.range(id).start;
        let body =
            |range: std::ops::Range<usize>| bytes.slice(range.start - start..range.end - start);
        let mut parts = Scatter::new(plan, [id].into_iter()).parts(body);
        parts.retain(|(shard, _)| shards.contains(shard));
        if parts.is_empty() {
            // The variable has no elements, or none on these shards.
            return Ok(());
        }
        let order = PushOrder::of_parts(operation, None, ReadPoint::default(), parts);
        self.assign_order(order, plan).await.map(|_| ())
    }

    /// Works before the worker has joined: the chief assigns the first values while it joins.
    pub(super) fn assign_order(&self, order: PushOrder, plan: &Arc<ShardingPlan>) -> PushHandle {
        let SessionClient { caller, config, .. } = &self.client;
        let call = caller.call("push", SessionCommand::Push { order }, config.timeout);
        PushHandle::new(call, Some(plan.clone()))
    }
}
