//! [`DenseRing`]: the ring around which replicas of servers average their dense gradients.

use pushpull_collective::{Reduction, Ring, RingElement, RingError, Tensor};
use pushpull_common::ids::{GlobalStep, VariableId};
use pushpull_common::tensor::{DType, Element, bf16, f16};

use super::ring_worker::RingWish;
use super::step_agreement::{ShortSteps, StepAgreement, StepClaim, StepKey};
use crate::error::Error;
use crate::gradients::packed_variables::PackedVariables;
use crate::gradients::params::{Gradients, Params, cast_elements};
use crate::token::Token;
use crate::worker::Worker;

/// The ring around which the replicas of a synchronous training average their dense gradients.
///
/// The servers keep all values and slots. Rank 0, the **lead**, gives them the mean of each dense
/// gradient, and pulls the dense values for all ranks; each rank pushes and pulls its own rows.
///
/// Every rank performs these operations in this order, so that they meet:
/// [`DenseRing::begin`] until a step is open, [`DenseRing::share_values`], [`DenseRing::end`],
/// and [`DenseRing::average`] if all ranks want the step.
///
/// Invariant: a step is open from a `begin` that opens it to its end, on every rank. An operation
/// that fails leaves a ring that is over, in which no step is open.
#[derive(Debug)]
pub struct DenseRing {
    ring: Ring,
    is_open: bool,
    has_ended: bool,
    is_over: bool,
    short: ShortSteps,
}

/// The claim of a rank at the beginning of a step.
#[derive(Debug)]
pub enum StepEntry<'a> {
    /// A token of the worker.
    Granted(&'a Worker, &'a Token),
    /// No token yet.
    Waiting,
    /// No wish for another step: the training ends for all ranks.
    Ending,
}

/// The rank that pushes dense gradients and pulls dense values.
const LEAD: u32 = 0;

impl DenseRing {
    /// Takes a ring that has formed.
    pub fn new(ring: Ring) -> DenseRing {
        let short = ShortSteps::default();
        DenseRing { ring, is_open: false, has_ended: false, is_over: false, short }
    }

    /// The ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Whether this rank pushes the dense gradients now.
    pub fn is_lead(&self) -> bool {
        self.ring.rank() == LEAD
    }

    /// Whether the other ranks expect this one at the end of a step.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether the ranks have agreed on the end of the training.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Whether the ring is over, so that [`DenseRing::recover`] must form another.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether a token of this step cannot be used: the servers have given other ranks none, in
    /// several attempts. The rank ends the step by a push without a gradient then.
    pub fn gives_up(&self, token: &Token) -> bool {
        self.short.gives_up(token.step())
    }

    /// Agrees with all ranks whether a step begins. It does if each has a token of that step;
    /// otherwise every rank drops its token and comes again. Lets late ranks in.
    ///
    /// Costs one small all-reduce.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn begin(&mut self, entry: StepEntry<'_>) -> Result<bool, Error> {
        let claim = match entry {
            StepEntry::Granted(worker, token) => StepClaim::Granted(StepKey {
                epoch: worker.joined_epoch.epoch.0,
                arena: worker.joined_epoch.arena,
                step: token.step(),
            }),
            StepEntry::Waiting => StepClaim::Waiting,
            StepEntry::Ending => StepClaim::Ending,
        };
        let mut words = [0; 9];
        let (joiners, claims) = words.split_at_mut(1);
        joiners[0] = i64::from(self.ring.joiners() > 0);
        claims.copy_from_slice(&claim.words());
        let reduced = self.ring.all_reduce_as("begin a step", &mut words, Reduction::Max).await;
        self.checked(reduced)?;
        let [has_joiners, claims @ ..] = words;
        let agreement = StepAgreement::of(claims);
        self.short.record(agreement);
        self.has_ended |= agreement == StepAgreement::End;
        if has_joiners != 0 && agreement != StepAgreement::End {
            let regrouped = self.ring.regroup().await;
            self.checked(regrouped)?;
            // A rank that has come begins with this operation, too.
            return Ok(false);
        }
        self.is_open = agreement == StepAgreement::Step;
        Ok(self.is_open)
    }

    /// Gives all ranks the dense values that the lead has pulled for the step; `has_pulled` is
    /// whether it has, and of no meaning on the others. Returns whether the ranks have values;
    /// otherwise the step is over on all of them.
    ///
    /// Variables that each rank changes by itself keep this rank's values.
    ///
    /// Costs a broadcast of all dense values.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn share_values(
        &mut self,
        has_pulled: bool,
        params: &mut Params,
    ) -> Result<bool, Error> {
        if self.ring.size() == 1 {
            self.is_open = has_pulled;
            return Ok(has_pulled);
        }
        let mut head = [i64::from(has_pulled), params.step.0 as i64];
        let sent = self.ring.broadcast(&mut head, LEAD).await;
        self.checked(sent)?;
        let [has_values, step] = head;
        if has_values == 0 {
            self.is_open = false;
            return Ok(false);
        }
        let own = PackedVariables::new(&params.plan, |it| it.replication().is_replicated());
        let mut own_values = own.buffer();
        own.pack(&params.buffer, &mut own_values);
        let values = bytemuck::cast_slice_mut::<u8, i64>(params.buffer.bytes_mut());
        let sent = self.ring.broadcast(values, LEAD).await;
        own.unpack(&own_values, &mut params.buffer);
        self.checked(sent)?;
        params.step = GlobalStep(step as u64);
        Ok(true)
    }

    /// Agrees with all ranks on the open step: returns the wish that counts. The step is over
    /// unless that is [`RingWish::Step`].
    ///
    /// Costs one small all-reduce.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn end(&mut self, wish: RingWish) -> Result<RingWish, Error> {
        let mut code = [wish.code()];
        let reduced = self.ring.all_reduce_as("end a step", &mut code, Reduction::Max).await;
        self.checked(reduced)?;
        self.is_open = false;
        let wish = RingWish::of_code(code[0]);
        self.has_ended |= wish == RingWish::End;
        Ok(wish)
    }

    /// Replaces the dense gradients by their means over all ranks. Every rank has gradients of the
    /// same variables. Small ones travel together.
    ///
    /// # Errors
    /// [`Error::Ring`]: [`RingError::Difference`] if another rank has other variables.
    pub async fn average(&mut self, gradients: &mut Gradients) -> Result<(), Error> {
        let present: Vec<VariableId> = gradients.present().collect();
        for &id in &present {
            gradients.apply_factor(id);
        }
        let averaged = async {
            self.average_as::<f32>(DType::F32, &present, gradients).await?;
            self.average_as::<f64>(DType::F64, &present, gradients).await?;
            self.average_as::<f16>(DType::F16, &present, gradients).await?;
            self.average_as::<bf16>(DType::Bf16, &present, gradients).await
        };
        let averaged = averaged.await;
        self.checked(averaged)
    }

    /// Averages the gradients of one type.
    async fn average_as<T: RingElement + Element>(
        &mut self,
        dtype: DType,
        present: &[VariableId],
        gradients: &mut Gradients,
    ) -> Result<(), RingError> {
        let plan = gradients.plan.clone();
        let variable = |id: VariableId| plan.catalogue().variable(id);
        let of_type = present.iter().copied().filter(|&id| variable(id).dtype() == dtype);
        let of_type: Vec<VariableId> = of_type.collect();
        let ranges: Vec<_> = of_type.iter().map(|&id| plan.range(id)).collect();
        let mut views: Vec<&mut [u8]> = ranges.iter().map(|_| &mut [][..]).collect();
        gradients.memory.buffer_mut().slices_mut(&ranges, &mut views);
        let named = of_type.iter().map(|&id| variable(id).name()).zip(views);
        let tensors = named.map(|(name, view)| Tensor { name, values: cast_elements::<T>(view) });
        let mut tensors: Vec<Tensor<'_, T>> = tensors.collect();
        self.ring.all_reduce_fused(&mut tensors, Reduction::Mean).await
    }

    /// Forms the next ring with the ranks that are left, after [`RingError::may_shrink`].
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn recover(&mut self) -> Result<(), Error> {
        self.ring.shrink().await?;
        self.is_over = false;
        self.short = ShortSteps::default();
        Ok(())
    }

    /// Ends the training for all ranks by a fault of this one.
    pub async fn give_up(&mut self, reason: &str) {
        self.ring.give_up(reason).await;
    }

    /// Leaves the ring.
    pub async fn leave(self) {
        self.ring.leave().await;
    }

    /// Records an error of the ring: no step is open on one that is over.
    fn checked<T>(&mut self, result: Result<T, RingError>) -> Result<T, Error> {
        if result.is_err() {
            self.is_over = true;
            self.is_open = false;
        }
        Ok(result?)
    }
}
