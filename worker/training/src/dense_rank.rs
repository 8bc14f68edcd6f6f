//! [`DenseRank`]: a worker of servers whose dense gradients go around a ring.

use std::time::{Duration, Instant};

use pushpull_common::protocol::Refusal;
use pushpull_worker::internal::{DenseRing, RingWish, StepEntry};
use pushpull_worker::{Error, Gradients, Params, Pulled, Push, Token, Worker};

/// A worker of servers in synchronous mode, and its place in the ring of all workers.
///
/// A step goes through these operations, which every rank performs in this order:
///
/// | operation | servers | ring |
/// | --- | --- | --- |
/// | `token` | grant it | |
/// | `pull` | the lead pulls the dense values | all agree on the step, and get the values |
/// | `push` | each rank pushes its rows, the lead the means as well | all agree, and average |
///
/// The servers admit and commit the step as any other, so the rows and the dense variables of a
/// checkpoint are of one step.
///
/// Invariant: a rank that is not in its place when the others come to an operation is on its way
/// to that operation, or its ring ends with an error.
#[derive(Debug)]
pub(super) struct DenseRank {
    pub(super) worker: Worker,
    pub(super) ring: Box<DenseRing>,
}

/// How long a rank waits for a token before it tells the others. Only a step that some ranks
/// cannot take part in takes so long.
const PATIENCE: Duration = Duration::from_secs(1);

impl DenseRank {
    pub(super) async fn token(&mut self) -> Result<Option<Token>, Error> {
        // A step that its caller has dropped counts on no rank.
        if self.ring.is_open() {
            self.ring.end(RingWish::Drop).await?;
        }
        let since = Instant::now();
        while !self.ring.has_ended() {
            let asked = Instant::now();
            match self.worker.token_within(PATIENCE).await {
                Err(error) if error.is_wait() => {
                    // The limit of a recovery may have ended the wait at once.
                    let is_cut = asked.elapsed() < PATIENCE / 2;
                    let waited = since.elapsed();
                    if is_cut || waited >= self.worker.timeout() {
                        return Err(having_waited(error, waited));
                    }
                    // Others may have a token of a step in which this rank has no part.
                    self.ring.begin(StepEntry::Waiting).await?;
                }
                Ok(Some(token)) if self.ring.gives_up(&token) => {
                    let none = self.worker.gradients();
                    self.worker.push_rows(token, none).await?;
                }
                taken => return taken,
            }
        }
        Ok(None)
    }

    pub(super) async fn pull(
        &mut self,
        token: &Token,
        params: &mut Params,
    ) -> Result<Pulled, Error> {
        if !self.ring.begin(StepEntry::Granted(&self.worker, token)).await? {
            return Ok(Pulled::Stale);
        }
        let pulled = match self.ring.is_lead() {
            true => self.worker.pull(token, params).await,
            false => Ok(Pulled::Stale),
        };
        let has_pulled = matches!(pulled, Ok(Pulled::Pulled { .. }));
        match self.ring.share_values(has_pulled, params).await? {
            true => Ok(Pulled::Pulled { step: params.step() }),
            false => pulled,
        }
    }

    pub(super) async fn push(
        &mut self,
        token: Token,
        mut gradients: Gradients,
    ) -> Result<Push, Error> {
        // After an error the step is still open, and ends on all ranks with the next token.
        self.worker.check_own(&gradients)?;
        match self.ring.end(RingWish::Step).await? {
            RingWish::Step => {}
            RingWish::Drop | RingWish::End => return Ok(Push::Stale { current: token.step() }),
        }
        self.ring.average(&mut gradients).await?;
        // All ranks have the same means, so all of them push or none.
        self.worker.check_dense(&gradients)?;
        match self.ring.is_lead() {
            true => self.worker.push(token, gradients).await,
            false => self.worker.push_rows(token, gradients).await,
        }
    }

    /// Ends the training on all ranks, and on the servers if `ends_servers`.
    pub(super) async fn finish(&mut self, ends_servers: bool) -> Result<(), Error> {
        if self.ring.is_open() {
            self.ring.end(RingWish::End).await?;
        }
        if !self.ring.has_ended() {
            self.ring.begin(StepEntry::Ending).await?;
        }
        match ends_servers && self.worker.is_chief() {
            true => self.worker.finish().await,
            false => Ok(()),
        }
    }

    /// Leaves the servers and the ring. A rank whose training has failed ends it on all ranks.
    pub(super) async fn leave(self) -> Result<(), Error> {
        let DenseRank { worker, mut ring } = self;
        if !ring.has_ended() {
            ring.give_up("its training has ended alone").await;
        }
        ring.leave().await;
        worker.leave().await
    }
}

/// Returns the error of a wait for a token, with the time of all its attempts.
fn having_waited(error: Error, waited: Duration) -> Error {
    match error {
        Error::Timeout { doing, awaited, sequence, .. } => {
            Error::Timeout { doing, waited, awaited, sequence }
        }
        Error::Refused { doing, shard, refusal: Refusal::Deadline { awaited, .. } } => {
            let waited_ms = waited.as_millis() as u64;
            Error::Refused { doing, shard, refusal: Refusal::Deadline { waited_ms, awaited } }
        }
        error => error,
    }
}
