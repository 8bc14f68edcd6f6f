//! The staleness of a gradient on this shard, and the adjustment of its update.

use std::ops::{Add, Mul, Range, Sub};
use std::sync::Arc;

use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::ApplyAt;
use pushpull_store::change::{ChangeInput, NoFreeBlock};
use pushpull_store::store::Store;

use super::TILE_BYTES;
use super::last_pulls::PulledValues;
use super::variables::Variables;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::config::StalenessPolicy;
use crate::inbox::Inbox;
use crate::metrics::Counters;

/// How the update of a push is adjusted. This is decided when its first byte is applied.
///
/// If the push is applied as its parts arrive, that is before it is complete. Nothing is committed
/// in between, or the dirty blocks are discarded. So the count of gradients and the staleness are
/// the same at its commit. The pulled values that it needs live as long as this.
#[derive(Debug)]
pub(in crate::shard) struct StalenessAdjustment {
    /// The count and the rate of the update.
    pub(in crate::shard) at: ApplyAt,
    /// How many gradients the shard has applied since it sent the values that this gradient was
    /// computed from; `None` if that is unknown.
    pub(in crate::shard) staleness: Option<u64>,
    compensation: Compensation,
}

/// The delay compensation of a gradient.
#[derive(Debug)]
enum Compensation {
    /// None is needed.
    None,
    /// It is needed, but the values that the gradient was computed from are not stored.
    Lacking,
    By {
        lambda: f64,
        read: Arc<PulledValues>,
    },
}

impl Default for StalenessAdjustment {
    fn default() -> StalenessAdjustment {
        StalenessAdjustment::none(ApplyAt::new(0, 0))
    }
}

impl StalenessAdjustment {
    /// Creates the adjustment of an update at this count that is not adjusted.
    pub(in crate::shard) fn none(at: ApplyAt) -> StalenessAdjustment {
        StalenessAdjustment { at, staleness: None, compensation: Compensation::None }
    }

    /// Returns the adjustment of the push in a slot, if it is applied next.
    pub(in crate::shard) fn of(
        push_slot: u32,
        inbox: &Inbox,
        variables: &Variables,
        owner: Option<&AsynchronousTokens>,
    ) -> StalenessAdjustment {
        let push = inbox.arrival(push_slot);
        let Some(push) = push.filter(|push| push.operation == Operation::Gradient {}) else {
            return StalenessAdjustment::default();
        };
        let policy = variables.config.mode.staleness();
        let staleness = match owner {
            // Every gradient has a share on the step owner, so steps count gradients. Unlike the
            // client's own count, the step survives this process, and cannot be older than the
            // grant.
            Some(owner) => Some(owner.staleness(push.token, push.step)),
            // No client can have read gradients that were not applied.
            None => push.read.map(|read| variables.gradients.saturating_sub(read)),
        };
        let at = ApplyAt::new(variables.gradients + 1, push.step.0);
        let at = at.at_rate(policy.rate(staleness.unwrap_or(0)));
        let compensation = match policy {
            StalenessPolicy::DelayCompensation { lambda } if staleness != Some(0) => {
                match variables.last_pulls.of(inbox.holder(push_slot), push.read) {
                    Some(read) => Compensation::By { lambda, read: read.clone() },
                    None => Compensation::Lacking,
                }
            }
            _ => Compensation::None,
        };
        StalenessAdjustment { at, staleness, compensation }
    }

    /// Counts a gradient that was applied with this adjustment.
    pub(in crate::shard) fn count(&self, counters: &Counters) {
        match self.staleness {
            Some(staleness) => counters.staleness.add(staleness),
            None => counters.staleness_unknown.add(1),
        }
        if matches!(self.compensation, Compensation::Lacking) {
            counters.gradients_uncompensated.add(1);
        }
    }

    /// Calls `take` for a range of one partition with the push's values, or tile by tile with the
    /// compensated values.
    pub(in crate::shard) fn each(
        &self,
        store: &mut Store,
        dtype: DType,
        range: Range<u64>,
        mut input: ChangeInput<'_>,
        tile: &mut Vec<u64>,
        mut take: impl FnMut(&mut Store, Range<u64>, ChangeInput<'_>) -> Result<(), NoFreeBlock>,
    ) -> Result<(), NoFreeBlock> {
        let Compensation::By { lambda, read } = &self.compensation else {
            return take(store, range, input);
        };
        for start in range.clone().step_by(TILE_BYTES as usize) {
            let range = start..range.end.min(start + TILE_BYTES);
            tile.resize(tile.len().max(TILE_BYTES as usize / 8), 0);
            let length = (range.end - range.start) as usize;
            let gradient = &mut bytemuck::cast_slice_mut(tile)[..length];
            input.fill(gradient);
            let read = read.bytes(&range);
            let mut done = 0;
            for now in store.before(range.clone()) {
                let piece = done..done + now.len();
                let gradient = &mut gradient[piece.clone()];
                compensate(dtype, *lambda, gradient, &read[piece.clone()], now);
                done = piece.end;
            }
            take(store, range, (&*gradient).into())?;
        }
        Ok(())
    }
}

/// Compensates a gradient for the change from the values it was computed from (`read`) to those it
/// is applied to (`now`). All three have the same type and length.
///
/// An element whose compensation overflows stays unchanged, so a finite element never becomes
/// infinite.
///
/// # Panics
/// If the lengths differ, or the type is not a floating-point type.
fn compensate(dtype: DType, lambda: f64, gradient: &mut [u8], read: &[u8], now: &[u8]) {
    assert!(
        gradient.len() == read.len() && read.len() == now.len(),
        "a gradient and its values must have the same length"
    );
    match dtype {
        DType::F32 => elements::<f32>(lambda as f32, gradient, read, now, f32::is_finite),
        DType::F64 => elements::<f64>(lambda, gradient, read, now, f64::is_finite),
        _ => unreachable!("only floating-point variables are trainable"),
    }
}

fn elements<T>(lambda: T, gradient: &mut [u8], read: &[u8], now: &[u8], finite: impl Fn(T) -> bool)
where
    T: Element + Add<Output = T> + Sub<Output = T> + Mul<Output = T>,
{
    let gradient: &mut [T] = bytemuck::cast_slice_mut(gradient);
    let read: &[T] = bytemuck::cast_slice(read);
    let now: &[T] = bytemuck::cast_slice(now);
    for ((g, &read), &now) in gradient.iter_mut().zip(read).zip(now) {
        // The square of a large gradient may overflow where its product with a small change does
        // not.
        let compensated = *g + (lambda * *g) * (*g * (now - read));
        if finite(compensated) {
            *g = compensated;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradient, the value that was read, the current value, and the compensated gradient for a
    /// lambda of 0.5; all exact in `f32`.
    const CASES: [[f64; 4]; 8] = [
        [2.0, 1.0, 1.0, 2.0],
        [2.0, 1.0, 3.0, 6.0],
        [-2.0, 1.0, 3.0, 2.0],
        [2.0, 1.0, -3.0, -6.0],
        [0.0, 1.0, 3.0, 0.0],
        [-0.5, 0.25, -0.25, -0.5625],
        // g g overflows here; in the next case the sum does.
        [1.25e38, 1.0, 1.0, 1.25e38],
        [f32::MAX as f64, 0.0, 1.0, f32::MAX as f64],
    ];

    #[test]
    fn compensation_adds_the_squared_gradient_times_the_change() {
        let column = |column: usize| CASES.map(|case| case[column] as f32);
        let mut gradient = column(0);
        let read = column(1);
        let now = column(2);
        let read = bytemuck::cast_slice(&read);
        let now = bytemuck::cast_slice(&now);
        compensate(DType::F32, 0.5, bytemuck::cast_slice_mut(&mut gradient), read, now);
        assert_eq!(gradient, column(3));

        let column = |column: usize| CASES.map(|case| case[column]);
        let mut gradient = column(0);
        let read = column(1);
        let now = column(2);
        let read = bytemuck::cast_slice(&read);
        let now = bytemuck::cast_slice(&now);
        compensate(DType::F64, 0.5, bytemuck::cast_slice_mut(&mut gradient), read, now);
        // The last case does not overflow in this type.
        assert_eq!(gradient[..7], column(3)[..7]);
    }

    #[test]
    fn elements_with_a_non_finite_result_stay_unchanged() {
        let mut gradient = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0];
        let read = [0.0; 4];
        let now = [1.0, 0.0, 1.0, f64::INFINITY];
        let bytes = bytemuck::cast_slice_mut(&mut gradient);
        compensate(DType::F64, 1.0, bytes, bytemuck::cast_slice(&read), bytemuck::cast_slice(&now));
        assert_eq!((gradient[0], gradient[1]), (f64::INFINITY, f64::NEG_INFINITY));
        assert_eq!((gradient[2].is_nan(), gradient[3]), (true, 1.0));
    }
}
