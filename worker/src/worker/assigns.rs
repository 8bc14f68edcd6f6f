//! Values that are given to variables, whoever trains them.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::Element;

use super::Worker;
use crate::client::Client;
use crate::error::{Error, ViewError};
use crate::handles::PushHandle;
use crate::initial_values::padded;
use crate::joined_model::{check_finite, check_rows_finite};
use crate::rows::{self, Cutting};
use crate::session::{Command, PushOrder, Read};
use crate::sharding_plan::ShardingPlan;
use crate::staging::StagedParts;

impl Worker {
    /// Gives a variable new values, whoever trains it. Needs no token; the step stays.
    pub async fn assign<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        let plan = self.joined("assign")?.plan.clone();
        let (id, bytes) = padded(&plan, name, values)?;
        self.assign_bytes(&plan, id, bytes, Operation::Assign {}, plan.shards()).await
    }

    /// Adds to a plain variable, exactly once. Integers wrap. Needs no token; the step stays.
    pub async fn assign_add<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        let plan = self.joined("add")?.plan.clone();
        let (id, bytes) = padded(&plan, name, values)?;
        if plan.catalogue().variable(id).is_trainable() {
            return Err(ViewError::Trainable { name: name.to_owned() }.into());
        }
        self.assign_bytes(&plan, id, bytes, Operation::AssignAdd {}, plan.shards()).await
    }

    /// Gives rows of a sparse variable new values, each once; as [`Worker::assign`].
    pub async fn assign_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        let plan = self.joined("assign rows")?.plan.clone();
        let variable = rows::check::<T>(&plan, name, ids, rows.len())?;
        if let Some((row, place)) = rows::twice(ids) {
            return Err(ViewError::RowTwice { name: name.to_owned(), row, place }.into());
        }
        let mut own = StagedParts::default();
        own.rows.set(&plan, variable, ids, rows)?;
        for rows in own.rows.iter() {
            check_rows_finite(self.client.welcomed.non_finite, &plan, rows, 1.0)?;
        }
        if ids.is_empty() {
            return Ok(());
        }
        own.rows.cut(&plan, variable, Cutting { all: false, values: true, factor: 1.0 });
        let (operation, own) = (Operation::Assign {}, Some(Arc::new(own)));
        let order = PushOrder::of_parts(operation, None, Read::default(), Vec::new());
        let order = PushOrder { own, ..order };
        self.assign_order(order, &plan).await.map(|_| ())
    }

    pub(crate) async fn assign_bytes(
        &self,
        plan: &Arc<ShardingPlan>,
        id: VariableId,
        bytes: Bytes,
        operation: Operation,
        shards: &[ShardId],
    ) -> Result<(), Error> {
        check_finite(self.client.welcomed.non_finite, plan, id, &bytes, 1.0)?;
        let start = plan.range(id).start;
        let body =
            |range: std::ops::Range<usize>| bytes.slice(range.start - start..range.end - start);
        let mut parts = plan.parts([id].into_iter(), body);
        parts.retain(|(shard, _)| shards.contains(shard));
        if parts.is_empty() {
            // A variable without elements, or none there: there is nothing to do.
            return Ok(());
        }
        let order = PushOrder::of_parts(operation, None, Read::default(), parts);
        self.assign_order(order, plan).await.map(|_| ())
    }

    /// Before the worker has joined, too: the chief gives variables their first values then.
    fn assign_order(&self, order: PushOrder, plan: &Arc<ShardingPlan>) -> PushHandle {
        let Client { caller, config, .. } = &self.client;
        let call = caller.call("push", Command::Push { order }, config.timeout);
        PushHandle::new(call, Some(plan.clone()))
    }
}
