//! [`RingTrainer`]: a model that the ranks of a ring train together.

#[cfg(doc)]
use pushpull_collective::RingError;
use pushpull_collective::{Ring, RingMetrics};

use super::ring_trainer_config::RingTrainerConfig;
use super::ring_worker::RingWorker;
use super::streamed_step::StreamedStep;
use crate::error::Error;
use crate::gradients::params::{Gradients, Params};
use crate::initial_values::InitialValues;
use crate::outcome::{RestoredCheckpoint, SavedCheckpoint};

/// A model that the ranks of a ring train together: each computes the gradient of its share of a
/// batch, the mean goes around the ring, and the rule updates the values on each rank.
///
/// - **Start.** The rank with the newest values has all others take them: after a restart that is
///   rank 0 with the newest checkpoint, or with the first values. No program can forget that.
/// - **Step.** [`RingTrainer::apply`] reduces and applies the gradients. [`RingTrainer::begin`] does
///   as well, while the program computes them. All ranks have the same bits afterwards.
/// - **Loss.** After an error for which [`RingError::may_shrink`], [`RingTrainer::recover`] goes on
///   with the ranks that are left.
/// - **Checkpoints.** Rank 0 saves, in the format of servers: they can go on with it, and a ring
///   with theirs.
#[derive(Debug)]
#[doc(alias = "hvd.DistributedOptimizer")]
#[doc(alias = "DistributedOptimizer")]
#[doc(alias = "BroadcastGlobalVariablesHook")]
pub struct RingTrainer {
    pub(super) worker: RingWorker,
    pub(super) params: Params,
    gradients: Gradients,
    regroup_every: u64,
}

impl RingTrainer {
    /// Starts a training on a ring: restores the newest checkpoint or sets the first values, and
    /// brings all ranks to them. Rank 0 calls `fill` if there is no checkpoint; other variables
    /// have the values of their initializers.
    ///
    /// # Errors
    /// - [`Error::Config`] for invalid variables and rules.
    /// - [`Error::Checkpoint`] on rank 0 if the checkpoints cannot be read; the others get
    ///   [`RingError::GivenUp`] with the cause.
    /// - [`Error::Ring`] for faults of the ring. Ranks with other variables or rules get
    ///   [`RingError::Difference`].
    pub async fn start(
        ring: Ring,
        config: RingTrainerConfig,
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<RingTrainer, Error> {
        let regroup_every = config.regroup_every;
        let (worker, params) = RingWorker::join(ring, config, fill).await?;
        let gradients = worker.gradients();
        Ok(RingTrainer { worker, params, gradients, regroup_every })
    }

    /// The ring. Operations of the program's own must come in the same order on all ranks.
    pub fn ring(&mut self) -> &mut Ring {
        self.worker.ring_mut()
    }

    /// The number of steps that were made, by this training and those whose checkpoints it
    /// continues.
    pub fn global_step(&self) -> u64 {
        self.worker.global_step()
    }

    /// The checkpoint from which the training was restored, on rank 0.
    pub fn restored(&self) -> Option<&RestoredCheckpoint> {
        self.worker.restored()
    }

    /// Returns the counts and times of this rank.
    pub fn metrics(&self) -> RingMetrics {
        self.worker.ring().metrics()
    }

    /// Returns the values, and the gradients of the next step, which are empty after each
    /// [`RingTrainer::apply`].
    pub fn parts(&mut self) -> (&Params, &mut Gradients) {
        (&self.params, &mut self.gradients)
    }

    /// Reduces the gradients of all ranks to their mean and applies it. Every rank gives gradients
    /// of the same variables. Returns the global step.
    ///
    /// # Errors
    /// - [`Error::Ring`]: see [`RingTrainer::recover`].
    /// - [`Error::NonFinite`] on every rank, if the mean is NaN or infinite: nothing has changed, and
    ///   the training may go on.
    /// - [`Error::EmptyPush`] if no variable has a gradient.
    pub async fn apply(&mut self) -> Result<u64, Error> {
        let step = self.worker.apply(&mut self.gradients, &mut self.params).await?;
        self.regroup_after(step).await
    }

    /// Begins a step whose gradients are reduced as they become ready, by a thread that has the ring
    /// meanwhile. A backward pass makes those of the last layer first, so they are on their way while
    /// it computes the others.
    ///
    /// The means have the bits of [`RingTrainer::apply`], and one rank may stream a step that another
    /// applies. The values of [`RingTrainer::parts`] are those of [`StreamedStep::params`].
    ///
    /// Costs a start of a thread, and in the first step the memory of all gradients.
    ///
    /// # Errors
    /// [`Error::Thread`] if no thread starts.
    pub fn begin(&mut self) -> Result<StreamedStep<'_>, Error> {
        self.worker.begin(false)?;
        Ok(StreamedStep::new(self))
    }

    /// Lets late ranks in, if they may come after this step. Returns the step.
    pub(super) async fn regroup_after(&mut self, step: u64) -> Result<u64, Error> {
        if self.regroup_every > 0 && step.is_multiple_of(self.regroup_every) {
            self.worker.regroup(&mut self.params).await?;
        }
        Ok(step)
    }

    /// Forms the next ring with the ranks that are left, after [`RingError::may_shrink`], and brings
    /// all to the newest state. Every rank that goes on calls it. Gradients that were not applied on
    /// the rank with the newest state do not count.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn recover(&mut self) -> Result<(), Error> {
        self.gradients.reset();
        self.worker.recover(&mut self.params).await
    }

    /// Saves a checkpoint, on rank 0; `None` on the others, which do not wait. `user` is kept with
    /// it, at most 1 MiB. Blocks the thread while it writes.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it cannot be written, or no storage is configured.
    pub fn save(&mut self, user: &[u8]) -> Result<Option<SavedCheckpoint>, Error> {
        self.worker.save(&self.params, user)
    }

    /// Returns what this rank's codecs have left out so far, as bytes to be stored beside a
    /// checkpoint, one for each rank. [`RingTrainer::restore_residuals`] takes them back.
    ///
    /// Their length is that of one gradient of the encoded variables. A rank that resumes without
    /// them loses what it had not sent.
    ///
    /// # Errors
    /// None on a ring, where no device has residuals.
    pub fn residuals(&self) -> Result<Vec<u8>, Error> {
        self.worker.residuals()
    }

    /// Restores the residuals of [`RingTrainer::residuals`], of this rank or of another one. The
    /// variables must be the same. Variables without a saved residual start at zero.
    ///
    /// # Errors
    /// [`Error::DamagedResiduals`], [`Error::ForeignResiduals`] and
    /// [`Error::ResidualWithoutCodec`]; nothing has changed then.
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.worker.restore_residuals(bytes)
    }

    /// Leaves the ring. Returns the values.
    pub async fn leave(self) -> Params {
        self.worker.leave().await;
        self.params
    }
}
