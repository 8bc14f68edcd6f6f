//! The operations by which the ranks of a training agree on a step and average its gradients.

use pushpull_collective::{Reduction, Ring, RingError};
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, bf16, f16};

use super::gradient_codecs::GradientCodecs;
use super::ring_worker::RingWish;
use crate::error::Error;
use crate::gradients::params::cast_elements;
use crate::gradients::sharding_plan::ShardingPlan;

/// The common wish of all ranks for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The wish that counts.
    pub wish: RingWish,
    /// Whether late ranks wait.
    pub has_joiners: bool,
}

impl Agreement {
    /// The agreement of ranks that need none.
    pub(super) const STEP: Agreement = Agreement { wish: RingWish::Step, has_joiners: false };
}

/// Agrees with all ranks on a step. Costs one small all-reduce.
pub(super) async fn agree(
    ring: &mut Ring,
    step: u64,
    wish: RingWish,
) -> Result<Agreement, RingError> {
    let mut wishes = [wish.code(), i32::from(ring.joiners() > 0)];
    ring.all_reduce_as(&format!("step {step}"), &mut wishes, Reduction::Max).await?;
    let [code, joiners] = wishes;
    Ok(Agreement { wish: RingWish::of_code(code), has_joiners: joiners == 1 })
}

/// Averages the gradients of variables of one type that follow each other: `bytes` has all of them.
/// One that travels encoded is alone.
///
/// # Errors
/// [`Error::Ring`]; [`Error::NonFinite`] on every rank if a gradient cannot be encoded.
pub(super) async fn reduce(
    ring: &mut Ring,
    codecs: &mut GradientCodecs,
    plan: &ShardingPlan,
    variables: &[VariableId],
    bytes: &mut [u8],
) -> Result<(), Error> {
    let Some(first) = variables.first() else { return Ok(()) };
    if codecs.covers(*first) {
        return codecs.reduce(ring, plan, *first, bytes).await;
    }
    let names = variables.iter().map(|&id| plan.catalogue().variable(id).name());
    let names = names.collect::<Vec<_>>().join(", ");
    Ok(average_as(ring, plan.catalogue().variable(*first).dtype(), &names, bytes).await?)
}

/// Averages elements of this type.
pub(super) async fn average_as(
    ring: &mut Ring,
    dtype: DType,
    name: &str,
    bytes: &mut [u8],
) -> Result<(), RingError> {
    let mean = Reduction::Mean;
    match dtype {
        DType::F64 => ring.all_reduce_as::<f64>(name, cast_elements(bytes), mean).await,
        DType::F16 => ring.all_reduce_as::<f16>(name, cast_elements(bytes), mean).await,
        DType::Bf16 => ring.all_reduce_as::<bf16>(name, cast_elements(bytes), mean).await,
        _ => ring.all_reduce_as::<f32>(name, cast_elements(bytes), mean).await,
    }
}
