//! What a worker has once it has joined: the variables, how their gradients travel, and the way to the
//! session. Pushes that are under way share it, so that they borrow nothing of the worker.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_common::finite::first_non_finite;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::tensor::DType;

use crate::client::Client;
use crate::compression::{Compression, find_in_singles};
use crate::error::Error;
use crate::handles::PushHandle;
use crate::params::Gradients;
use crate::parts::Scatter;
use crate::push_buffers::Run;
use crate::rows::{Cutting, RowsOf};
use crate::runtime::Caller;
use crate::session::Command;
use crate::sharding_plan::ShardingPlan;
use crate::staging::{Copies, StagedParts};

/// What is shared by a worker and its pushes.
#[derive(Debug)]
pub(crate) struct JoinedModel {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) caller: Arc<Caller>,
    pub(crate) timeout: Duration,
    /// What of gradients may lie in rooms of trays: what travels as it lies.
    pub(crate) runs: Arc<[Run]>,
    compression: Mutex<Compression>,
    non_finite: NonFinitePolicy,
    owner: ShardId,
    /// Memory for what is sent variable by variable: each has its own, as the next push of it is as long.
    spares: Mutex<BTreeMap<VariableId, Vec<Arc<StagedParts>>>>,
}

impl JoinedModel {
    pub(crate) fn new(
        plan: Arc<ShardingPlan>,
        client: &Client,
        compression: Compression,
    ) -> JoinedModel {
        let runs = plan.runs(|id| !compression.covers(id)).into();
        JoinedModel {
            plan,
            runs,
            caller: client.caller.clone(),
            timeout: client.config.timeout,
            compression: Mutex::new(compression),
            non_finite: client.welcomed.non_finite,
            owner: client.owner,
            spares: Mutex::default(),
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

    /// Scans gradients for NaN and infinity and checks them against the codecs, before any of them is encoded or
    /// sent. With one shard the shard scans what travels as it is: it refuses the push before any of it counts.
    pub(crate) fn check(&self, gradients: &Gradients) -> Result<(), Error> {
        let (plan, compression) = (&self.plan, self.compression());
        let one_shard = plan.shards() == [self.owner];
        // There may be many variables, and nothing to check for any of them.
        let none = one_shard && compression.is_of_none() && !plan.has_some_halves();
        for id in gradients.present().take_while(|_| !none) {
            let (bytes, factor) = (gradients.bytes_of(id), gradients.factor(id));
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

    /// Whether the gradient of a variable is sent without a codec and in the type that its shards keep.
    fn is_sent_as_it_is(&self, compression: &Compression, id: VariableId) -> bool {
        !compression.covers(id)
            && self.plan.catalogue().partitions_of(id).iter().all(|p| p.own.is_none())
    }

    /// Makes the parts of a push that are made for it alone: of rows, which are cut where they lie; and of
    /// what is encoded.
    pub(crate) fn make_parts(&self, gradients: &mut Gradients) -> Result<(), Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        let factors = &gradients.factors;
        let factor = |id| factors.get(&id).copied().unwrap_or(1.0);
        let own = gradients.memory.own_mut();
        let mut next = own.rows.variables().next();
        while let Some(id) = next {
            cut_rows(plan, &mut compression, own, id, factor(id))?;
            next = own.rows.variables().find(|other| *other > id);
        }
        if compression.is_of_none() {
            return Ok(());
        }
        let mut copies = std::mem::take(&mut own.copies);
        let result = gradients.present().try_for_each(|id| {
            compression.encode(plan, id, gradients.bytes_of(id), factor(id), &mut copies)
        });
        gradients.memory.own_mut().copies = copies;
        result
    }

    /// How the rest of a push travels.
    pub(crate) fn scatter(&self, gradients: &Gradients) -> Scatter {
        let compression = self.compression();
        self.plan.scatter(gradients.present().filter(|&id| !compression.covers(id)))
    }

    /// Looks at a variable that is a part of a push, and copies it, or encodes it, as it travels.
    pub(crate) fn variable_parts(
        &self,
        id: VariableId,
        elements: &[u8],
        copies: &mut Copies,
    ) -> Result<(), Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        check_finite(self.non_finite, plan, id, elements, 1.0)?;
        compression.check(plan, id, elements, 1.0)?;
        if compression.covers(id) {
            return compression.encode(plan, id, elements, 1.0, copies);
        }
        copies.add_variable(plan, id, elements);
        Ok(())
    }

    /// Looks at the rows of variables that are a part of a push, and cuts them.
    pub(crate) fn rows_parts(&self, own: &mut StagedParts, id: VariableId) -> Result<(), Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        for rows in own.rows.iter() {
            check_rows_finite(self.non_finite, plan, rows, 1.0)?;
            compression.check_rows(plan, rows, 1.0)?;
        }
        cut_rows(plan, &mut compression, own, id, 1.0)
    }

    /// Memory for this variable in a push that is sent variable by variable, without any.
    pub(crate) fn spare(&self, id: VariableId) -> Arc<StagedParts> {
        let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        let own = spares.get_mut(&id).and_then(|spares| {
            let free = spares.iter().position(|own| Arc::strong_count(own) == 1)?;
            Some(spares.swap_remove(free))
        });
        drop(spares);
        let mut own = own.unwrap_or_default();
        match Arc::get_mut(&mut own) {
            Some(free) => free.empty(),
            None => own = Arc::default(),
        }
        own
    }

    /// Keeps the memory of such a variable, for when it is sent.
    pub(crate) fn keep(&self, id: VariableId, own: &Arc<StagedParts>) {
        let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        let spares = spares.entry(id).or_default();
        if spares.len() < SPARES_MAX {
            spares.push(own.clone());
        }
    }
}

/// Cuts the rows of a variable into the parts in which they travel, and encodes them if that is how.
fn cut_rows(
    plan: &ShardingPlan,
    compression: &mut Compression,
    own: &mut StagedParts,
    id: VariableId,
    factor: f64,
) -> Result<(), Error> {
    let StagedParts { rows, copies } = own;
    let encoded = compression.covers(id);
    rows.cut(plan, id, Cutting { all: true, values: !encoded, factor });
    let mut held = rows.held(plan).take_while(|_| encoded);
    held.try_for_each(|(partition, rows)| {
        compression.encode_rows(plan, partition, rows, factor, copies)
    })
}

/// How many memories for a variable are kept: that of a push that is on its way, and that of the next.
const SPARES_MAX: usize = 2;

/// Looks for NaN and infinities, by the servers' policy, among what they multiply with `factor`.
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

/// The same for rows.
pub(crate) fn check_rows_finite(
    policy: NonFinitePolicy,
    plan: &ShardingPlan,
    rows: RowsOf<'_>,
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

/// The first element that is NaN or infinite, or is once it is multiplied.
fn first_bad(dtype: DType, bytes: &[u8], factor: f64) -> Option<(usize, f64)> {
    if factor.abs() <= 1.0 {
        return first_non_finite(dtype, bytes);
    }
    let bad = |products: &[f32]| first_non_finite(DType::F32, bytemuck::cast_slice(products));
    let found = find_in_singles(dtype, bytes, factor, bad);
    found.map(|(first, (element, value))| (first + element, value))
}
