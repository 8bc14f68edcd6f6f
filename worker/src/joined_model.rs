//! The state of a worker that has joined: the variables, the codecs of their gradients, and access
//! to the session. Pushes under way share it, so they do not borrow the worker.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_common::finite::first_non_finite;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::tensor::DType;

use crate::client::SessionClient;
use crate::compression::{Compression, find_in_f32};
use crate::error::Error;
use crate::gradients::gradient_buffer::BufferRun;
use crate::gradients::params::Gradients;
use crate::gradients::part_buffer::PartBuffer;
use crate::gradients::rows::{RowPartOptions, VariableRows};
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::gradients::staged_parts::StagedParts;
use crate::runtime::Caller;

/// What a joined worker shares with its pushes.
#[derive(Debug)]
pub(crate) struct JoinedModel {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) caller: Arc<Caller>,
    pub(crate) timeout: Duration,
    /// The ranges of gradients that may be in push buffers: those that are sent unchanged.
    pub(crate) runs: Arc<[BufferRun]>,
    compression: Mutex<Compression>,
    pub(crate) non_finite: NonFinitePolicy,
    owner: ShardId,
    /// Memory for streamed pushes, by variable: the next push of a variable usually has the same
    /// length.
    staging_pool: Mutex<BTreeMap<VariableId, Vec<Arc<StagedParts>>>>,
}

impl JoinedModel {
    pub(crate) fn new(
        plan: Arc<ShardingPlan>,
        client: &SessionClient,
        compression: Compression,
    ) -> JoinedModel {
        let runs = plan.runs(|id| !compression.covers(id)).into();
        JoinedModel {
            plan,
            runs,
            caller: client.caller.clone(),
            timeout: client.config.timeout,
            compression: Mutex::new(compression),
            non_finite: client.settings.non_finite,
            owner: client.owner,
            staging_pool: Mutex::default(),
        }
    }

    /// Locks the codecs and their residuals.
    pub(crate) fn compression(&self) -> MutexGuard<'_, Compression> {
        // After a panic in a codec a residual still consists of numbers, if wrong ones.
        self.compression.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scans gradients for NaN and infinity and checks them against the codecs, before any of them
    /// is encoded or sent. With one shard, that shard scans the unencoded gradients: it refuses the
    /// push before any of it counts.
    pub(crate) fn check(&self, gradients: &Gradients) -> Result<(), Error> {
        let plan = &self.plan;
        let compression = self.compression();
        let one_shard = plan.shards() == [self.owner];
        // Skips the loop over possibly many variables if there is nothing to check.
        let none = one_shard && compression.is_empty() && !plan.has_some_halves();
        for id in gradients.present().take_while(|_| !none) {
            let bytes = gradients.bytes_of(id);
            let factor = gradients.factor(id);
            if !(one_shard && self.is_sent_as_it_is(&compression, id)) {
                check_finite(self.non_finite, plan, id, bytes, factor)?;
            }
            compression.check(plan, id, bytes, factor)?;
        }
        for rows in gradients.memory.rows().iter() {
            let factor = gradients.factor(rows.variable);
            check_rows_finite(self.non_finite, plan, rows, factor)?;
            compression.check_rows(plan, rows, factor)?;
        }
        Ok(())
    }

    /// Whether the gradient of a variable is sent without a codec, in the type that its shards
    /// keep.
    fn is_sent_as_it_is(&self, compression: &Compression, id: VariableId) -> bool {
        !compression.covers(id)
            && self.plan.catalogue().partitions_of(id).iter().all(|p| p.own_encoding.is_none())
    }

    /// Makes the parts that exist for this push only: those of rows, which are cut in place, and
    /// those of encoded gradients.
    pub(crate) fn make_parts(&self, gradients: &mut Gradients) -> Result<(), Error> {
        let plan = &self.plan;
        let mut compression = self.compression();
        let factors = &gradients.factors;
        let factor = |id| factors.get(&id).copied().unwrap_or(1.0);
        let staged = gradients.memory.staged_mut();
        let mut next = staged.rows.variables().next();
        while let Some(id) = next {
            cut_rows(plan, &mut compression, staged, id, factor(id))?;
            next = staged.rows.variables().find(|other| *other > id);
        }
        if compression.is_empty() {
            return Ok(());
        }
        let mut copies = std::mem::take(&mut staged.copies);
        let result = gradients.present().try_for_each(|id| {
            compression.encode(plan, id, gradients.bytes_of(id), factor(id), &mut copies)
        });
        gradients.memory.staged_mut().copies = copies;
        result
    }

    /// Plans the parts of the unencoded dense gradients.
    pub(crate) fn scatter(&self, gradients: &Gradients) -> Scatter {
        let compression = self.compression();
        Scatter::new(&self.plan, gradients.present().filter(|&id| !compression.covers(id)))
    }

    /// Checks the gradient of a variable of a streamed push, and adds its parts to `copies`,
    /// encoded if it has a codec.
    pub(crate) fn variable_parts(
        &self,
        id: VariableId,
        elements: &[u8],
        copies: &mut PartBuffer,
    ) -> Result<(), Error> {
        let plan = &self.plan;
        let mut compression = self.compression();
        check_finite(self.non_finite, plan, id, elements, 1.0)?;
        compression.check(plan, id, elements, 1.0)?;
        if compression.covers(id) {
            return compression.encode(plan, id, elements, 1.0, copies);
        }
        copies.add_variable(plan, id, elements);
        Ok(())
    }

    /// Checks the rows of a streamed push, and cuts them into parts.
    pub(crate) fn rows_parts(&self, staged: &mut StagedParts, id: VariableId) -> Result<(), Error> {
        let plan = &self.plan;
        let mut compression = self.compression();
        for rows in staged.rows.iter() {
            check_rows_finite(self.non_finite, plan, rows, 1.0)?;
            compression.check_rows(plan, rows, 1.0)?;
        }
        cut_rows(plan, &mut compression, staged, id, 1.0)
    }

    /// Returns empty memory for this variable of a streamed push.
    pub(crate) fn take_staging(&self, id: VariableId) -> Arc<StagedParts> {
        let mut staging_pool = self.staging_pool.lock().unwrap_or_else(PoisonError::into_inner);
        let staged = staging_pool.get_mut(&id).and_then(|staging_pool| {
            let free = staging_pool.iter().position(|staged| Arc::strong_count(staged) == 1)?;
            Some(staging_pool.swap_remove(free))
        });
        drop(staging_pool);
        let mut staged = staged.unwrap_or_default();
        match Arc::get_mut(&mut staged) {
            Some(free) => free.empty(),
            None => staged = Arc::default(),
        }
        staged
    }

    /// Returns such memory to the pool; it is free once it has been sent.
    pub(crate) fn return_staging(&self, id: VariableId, staged: &Arc<StagedParts>) {
        let mut staging_pool = self.staging_pool.lock().unwrap_or_else(PoisonError::into_inner);
        let staging_pool = staging_pool.entry(id).or_default();
        if staging_pool.len() < STAGING_MAX {
            staging_pool.push(staged.clone());
        }
    }
}

/// Cuts the rows of a variable into parts, and encodes them if the variable has a codec.
fn cut_rows(
    plan: &ShardingPlan,
    compression: &mut Compression,
    staged: &mut StagedParts,
    id: VariableId,
    factor: f64,
) -> Result<(), Error> {
    let StagedParts { rows, copies } = staged;
    let encoded = compression.covers(id);
    rows.cut(plan, id, RowPartOptions { include_empty: true, include_values: !encoded, factor });
    let mut partitions = rows.by_partition(plan).take_while(|_| encoded);
    partitions.try_for_each(|(partition, rows)| {
        compression.encode_rows(plan, partition, rows, factor, copies)
    })
}

/// The most memories in the pool for each variable: one that is being sent, and the next.
const STAGING_MAX: usize = 2;

/// Checks a variable for NaN and infinity, as the servers would find it after they multiply by
/// `factor`, if their policy rejects those.
pub(crate) fn check_finite(
    policy: NonFinitePolicy,
    plan: &ShardingPlan,
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

impl Gradients {
    /// Scans all gradients for NaN and infinity.
    #[doc(hidden)]
    pub fn check_finite(&self) -> Result<(), Error> {
        let policy = NonFinitePolicy::Reject {};
        let plan = &self.plan;
        for id in self.present() {
            check_finite(policy, plan, id, self.bytes_of(id), self.factor(id))?;
        }
        for rows in self.memory.rows().iter() {
            check_rows_finite(policy, plan, rows, self.factor(rows.variable))?;
        }
        Ok(())
    }
}

/// Checks rows for NaN and infinity, as [`check_finite`] does.
pub(crate) fn check_rows_finite(
    policy: NonFinitePolicy,
    plan: &ShardingPlan,
    rows: VariableRows<'_>,
    factor: f64,
) -> Result<(), Error> {
    if policy != (NonFinitePolicy::Reject {}) || rows.ids.is_empty() {
        return Ok(());
    }
    let dtype = plan.catalogue().variable(rows.variable).dtype();
    match first_bad(dtype, rows.values, factor) {
        None => Ok(()),
        Some((element, value)) => Err(rows.non_finite(plan, element, value)),
    }
}

/// Returns the first element that is NaN or infinite, after it is multiplied by `factor`.
fn first_bad(dtype: DType, bytes: &[u8], factor: f64) -> Option<(usize, f64)> {
    if factor.abs() <= 1.0 {
        return first_non_finite(dtype, bytes);
    }
    let bad = |products: &[f32]| first_non_finite(DType::F32, bytemuck::cast_slice(products));
    let found = find_in_f32(dtype, bytes, factor, bad);
    found.map(|(first, (element, value))| (first + element, value))
}
