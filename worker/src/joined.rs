//! What a worker has once it has joined: the variables, how their gradients travel, and the way to the
//! session. Pushes that are under way share it, so that they borrow nothing of the worker.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::tensor::{DType, first_non_finite};

use crate::client::Client;
use crate::compression::{Compression, singles};
use crate::error::Error;
use crate::fanout::Plan;
use crate::handles::PushHandle;
use crate::params::Gradients;
use crate::parts::{Part, Scatter};
use crate::rows::RowSet;
use crate::runtime::Caller;
use crate::session::Command;

/// What is shared by a worker and its pushes.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) plan: Arc<Plan>,
    pub(crate) caller: Arc<Caller>,
    pub(crate) timeout: Duration,
    compression: Mutex<Compression>,
    non_finite: NonFinitePolicy,
    owner: ShardId,
}

impl Joined {
    pub(crate) fn new(plan: Arc<Plan>, client: &Client, compression: Compression) -> Joined {
        Joined {
            plan,
            caller: client.caller.clone(),
            timeout: client.config.timeout,
            compression: Mutex::new(compression),
            non_finite: client.welcomed.non_finite,
            owner: client.owner,
        }
    }

    /// The codecs, with what gradients have left out.
    pub(crate) fn compression(&self) -> MutexGuard<'_, Compression> {
        // A panic in a codec leaves a residual of numbers, of whatever worth.
        self.compression.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a push done, or waited for.
    pub(crate) fn push(&self, command: Command) -> PushHandle {
        let call = self.caller.call("push", command, self.timeout);
        PushHandle::new(call, Some(self.plan.clone()))
    }

    /// A push that was not begun, and why.
    pub(crate) fn refuse(&self, error: Error) -> PushHandle {
        PushHandle::new(self.caller.failed("push", error), None)
    }

    /// Looks at all that is to be pushed, before anything of it is encoded or sent.
    pub(crate) fn check(&self, gradients: &Gradients) -> Result<(), Error> {
        let (plan, compression) = (&self.plan, self.compression());
        for id in gradients.present() {
            let (bytes, factor) = (&gradients.bytes()[plan.range(id)], gradients.factor(id));
            if !self.is_looked_at_there(&compression, id) {
                check_finite(self.non_finite, plan, id, bytes, factor)?;
            }
            compression.check(plan, id, bytes, factor)?;
        }
        for rows in gradients.rows.values() {
            let factor = gradients.factor(rows.variable());
            check_rows_finite(self.non_finite, plan, rows, factor)?;
            compression.check_rows(plan, rows, factor)?;
        }
        Ok(())
    }

    /// Whether looking for NaN and infinities in the gradient of a variable can be left to its shard,
    /// which does so as the parts come. It can where the whole push goes to the step owner alone: what
    /// that refuses has been counted nowhere. What is encoded is looked at here, as it is now.
    fn is_looked_at_there(&self, compression: &Compression, id: VariableId) -> bool {
        self.plan.shards() == [self.owner]
            && !compression.covers(id)
            && self.plan.catalogue().partitions_of(id).iter().all(|p| p.own.is_none())
    }

    /// The parts of a push that are made for it alone: of rows, and of what is encoded.
    pub(crate) fn own_parts(
        &self,
        gradients: &Gradients,
    ) -> Result<Vec<(ShardId, Vec<Part>)>, Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        let mut parts: Vec<(ShardId, Vec<Part>)> = Vec::new();
        for rows in gradients.rows.values() {
            let factor = gradients.factor(rows.variable());
            parts.extend(compression.rows(plan, rows, factor)?);
        }
        for id in gradients.present() {
            if compression.covers(id) {
                let bytes = &gradients.bytes()[plan.range(id)];
                parts.extend(compression.parts(plan, id, bytes, gradients.factor(id))?);
            }
        }
        Ok(parts)
    }

    /// How the rest of a push travels.
    pub(crate) fn scatter(&self, gradients: &Gradients) -> Scatter {
        let compression = self.compression();
        self.plan.scatter(gradients.present().filter(|&id| !compression.covers(id)))
    }

    /// The parts of one variable of a push; `bytes` are its elements with their padding, and `aligned`
    /// the elements.
    pub(crate) fn variable_parts(
        &self,
        id: VariableId,
        bytes: &bytes::Bytes,
        aligned: &[u8],
    ) -> Result<Vec<(ShardId, Vec<Part>)>, Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        check_finite(self.non_finite, plan, id, bytes, 1.0)?;
        compression.check(plan, id, aligned, 1.0)?;
        if compression.covers(id) {
            return compression.parts(plan, id, aligned, 1.0);
        }
        let start = plan.range(id).start;
        Ok(plan
            .parts([id].into_iter(), |range| bytes.slice(range.start - start..range.end - start)))
    }

    /// The parts of the rows of one variable of a push.
    pub(crate) fn rows_parts(&self, rows: &RowSet) -> Result<Vec<(ShardId, Vec<Part>)>, Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        check_rows_finite(self.non_finite, plan, rows, 1.0)?;
        compression.check_rows(plan, rows, 1.0)?;
        compression.rows(plan, rows, 1.0)
    }
}

/// Looks for NaN and infinities, by the servers' policy, among what they multiply with `factor`.
pub(crate) fn check_finite(
    policy: NonFinitePolicy,
    plan: &Plan,
    id: VariableId,
    bytes: &[u8],
    factor: f64,
) -> Result<(), Error> {
    if policy != (NonFinitePolicy::Reject {}) {
        return Ok(());
    }
    let variable = plan.catalogue().variable(id);
    let bytes = &bytes[..variable.bytes() as usize];
    match first_bad(variable.dtype(), bytes, factor) {
        None => Ok(()),
        Some((element, value)) => {
            let variable = variable.name().to_owned();
            Err(Error::NonFinite { variable, element, value })
        }
    }
}

/// The same for rows.
pub(crate) fn check_rows_finite(
    policy: NonFinitePolicy,
    plan: &Plan,
    rows: &RowSet,
    factor: f64,
) -> Result<(), Error> {
    if policy != (NonFinitePolicy::Reject {}) || rows.len() == 0 {
        return Ok(());
    }
    let dtype = plan.catalogue().variable(rows.variable()).dtype();
    match first_bad(dtype, rows.values(), factor) {
        None => Ok(()),
        Some((element, value)) => Err(rows.non_finite(plan, element, value)),
    }
}

/// The first element that is NaN or infinite, or is once it is multiplied.
fn first_bad(dtype: DType, bytes: &[u8], factor: f64) -> Option<(usize, f64)> {
    if factor.abs() <= 1.0 {
        return first_non_finite(dtype, bytes);
    }
    let products = singles(dtype, bytes, factor);
    first_non_finite(DType::F32, bytemuck::cast_slice(&products))
}
