//! [`ReplicaWorker`]: what trains a replica: a worker of servers, or a rank of a ring.

use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::tensor::Element;
#[cfg(feature = "ring")]
use pushpull_worker::ViewError;
use pushpull_worker::internal::SaveHandle;
#[cfg(feature = "ring")]
use pushpull_worker::internal::{Agreement, RingWish, RingWorker, local_token};
use pushpull_worker::{
    Error, Gradients, Params, Pulled, Push, RestoredCheckpoint, StreamingPush, Token, Worker,
    WorkerMetrics,
};

#[cfg(feature = "ring")]
use super::dense_rank::DenseRank;
use super::training_end::StopReason;

/// What trains a replica: a worker of servers, or a rank of a ring.
#[derive(Debug)]
pub(super) enum ReplicaWorker {
    /// A worker of servers.
    Servers(Box<Worker>),
    /// A rank of a ring.
    #[cfg(feature = "ring")]
    Ring(Box<RingRank>),
    /// A worker of servers whose dense gradients go around a ring.
    #[cfg(feature = "ring")]
    DenseByRing(Box<DenseRank>),
}

/// The gradients of a step that are sent one by one.
#[derive(Debug)]
pub(super) enum ReplicaStream {
    /// To servers.
    Servers(StreamingPush),
    /// Around a ring, by the worker of the rank.
    #[cfg(feature = "ring")]
    Ring,
    /// Collected until the end, when a worker of servers averages the dense ones around its ring.
    #[cfg(feature = "ring")]
    Collected(Box<(Token, Gradients)>),
}

/// A rank of a ring in a training session.
///
/// All ranks agree once for each step, before they reduce its gradients. Invariant: a step that was
/// granted and neither pushed nor dropped for all is open.
#[cfg(feature = "ring")]
#[derive(Debug)]
pub(super) struct RingRank {
    pub(super) worker: RingWorker,
    /// Whether the other ranks expect a gradient, or a wish in its place.
    is_open: bool,
    /// Whether all ranks have agreed on the end.
    has_ended: bool,
    /// Whether the other ranks let late ones in, after a step that this rank has dropped.
    owes_regroup: bool,
    gradients: Option<Gradients>,
    metrics: WorkerMetrics,
}

#[cfg(feature = "ring")]
impl RingRank {
    pub(super) fn new(worker: RingWorker) -> RingRank {
        RingRank {
            worker,
            is_open: false,
            has_ended: false,
            owes_regroup: false,
            gradients: None,
            metrics: WorkerMetrics::default(),
        }
    }

    async fn token(&mut self, params: &mut Params) -> Result<Option<Token>, Error> {
        if std::mem::take(&mut self.owes_regroup) {
            self.worker.regroup(params).await?;
        }
        // A step that its caller has dropped counts on no rank.
        if std::mem::take(&mut self.is_open) {
            let _ = self.agree(RingWish::Drop, params).await?;
        }
        if self.has_ended {
            return Ok(None);
        }
        self.metrics.tokens += 1;
        Ok(Some(local_token(self.worker.global_step())))
    }

    /// Agrees on the step. Returns whether its gradients are reduced.
    async fn agree(&mut self, wish: RingWish, params: &mut Params) -> Result<bool, Error> {
        let Agreement { wish, has_joiners } = self.worker.agree(wish).await?;
        self.has_ended |= wish == RingWish::End;
        if has_joiners && wish == RingWish::Drop {
            self.worker.regroup(params).await?;
        }
        Ok(wish == RingWish::Step)
    }

    async fn push(&mut self, mut gradients: Gradients, params: &mut Params) -> Result<Push, Error> {
        self.worker.check(&gradients)?;
        self.is_open = false;
        let agreed = self.worker.agree(RingWish::Step).await?;
        let applied = match agreed.wish {
            RingWish::Step => self.worker.apply(&mut gradients, params).await.map(Some),
            RingWish::Drop | RingWish::End => Ok(None),
        };
        if let Ok(Some(_)) | Err(Error::NonFinite { .. }) = applied {
            // They are empty again.
            self.gradients = Some(gradients);
        }
        self.settle(agreed, applied, params).await
    }

    /// Ends a step whose gradients were streamed. The ranks agreed on it before they reduced its
    /// first bucket. Until then it is open: the ranks agree to drop it if it has no gradient.
    async fn finish_stream(&mut self, params: &mut Params) -> Result<Push, Error> {
        let (agreed, reduced) = self.worker.end_stream().await?;
        self.is_open = false;
        let applied = match (reduced, agreed.wish) {
            (Err(error), _) => Err(error),
            (Ok(()), RingWish::Step) => self.worker.apply_streamed(params).await.map(Some),
            (Ok(()), RingWish::Drop | RingWish::End) => Ok(None),
        };
        self.settle(agreed, applied, params).await
    }

    /// Drops a step whose gradients were streamed. It stays open, and counts on no rank, unless the
    /// ranks have ended it already.
    fn drop_stream(&mut self) {
        if let Some(Agreement { wish, has_joiners }) = self.worker.drop_stream() {
            self.is_open = false;
            self.has_ended |= wish == RingWish::End;
            self.owes_regroup = has_joiners && wish != RingWish::End;
        }
    }

    /// Lets late ranks in after a step, and counts it.
    async fn settle(
        &mut self,
        agreed: Agreement,
        applied: Result<Option<u64>, Error>,
        params: &mut Params,
    ) -> Result<Push, Error> {
        let Agreement { wish, has_joiners } = agreed;
        self.has_ended |= wish == RingWish::End;
        let has_ring = matches!(applied, Ok(_) | Err(Error::NonFinite { .. }));
        if has_joiners && wish != RingWish::End && has_ring {
            self.worker.regroup(params).await?;
        }
        match applied {
            Ok(Some(step)) => {
                self.metrics.pushes += 1;
                Ok(Push::Accepted { step })
            }
            Ok(None) => {
                self.metrics.pushes_stale += 1;
                Ok(Push::Stale { current: self.worker.global_step() })
            }
            Err(error) => {
                if let Error::NonFinite { .. } = error {
                    self.metrics.pushes_non_finite += 1;
                }
                Err(error)
            }
        }
    }

    /// Ends the training on all ranks.
    async fn finish(&mut self, params: &mut Params) -> Result<(), Error> {
        if !self.has_ended {
            self.is_open = false;
            self.agree(RingWish::End, params).await?;
        }
        Ok(())
    }

    /// Goes on with the ranks that are left.
    pub(super) async fn recover(&mut self, params: &mut Params) -> Result<(), Error> {
        self.is_open = false;
        self.owes_regroup = false;
        self.worker.recover(params).await
    }
}

impl ReplicaWorker {
    /// The worker of servers, if it is one.
    pub(super) fn of_servers(&self) -> Option<&Worker> {
        match self {
            ReplicaWorker::Servers(worker) => Some(worker),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => None,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => Some(&rank.worker),
        }
    }

    /// The worker of servers, if it is one.
    pub(super) fn of_servers_mut(&mut self) -> Option<&mut Worker> {
        match self {
            ReplicaWorker::Servers(worker) => Some(worker),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => None,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => Some(&mut rank.worker),
        }
    }

    /// Whether this replica is the chief now.
    pub(super) fn is_chief(&self) -> bool {
        match self {
            ReplicaWorker::Servers(worker) => worker.is_chief(),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.worker.ring().rank() == 0,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.is_chief(),
        }
    }

    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "a ring changes them"))]
    pub(super) async fn token(&mut self, params: &mut Params) -> Result<Option<Token>, Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.token().await,
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.token(params).await,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.token().await,
        }
    }

    /// Why there are no more tokens.
    pub(super) fn end_reason(&self) -> Option<StopReason> {
        match self {
            ReplicaWorker::Servers(worker) => worker.end_reason().map(StopReason::from),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => Some(StopReason::Finished),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => {
                let reason = rank.worker.end_reason().map(StopReason::from);
                Some(reason.unwrap_or(StopReason::Finished))
            }
        }
    }

    pub(super) async fn pull(
        &mut self,
        token: &Token,
        params: &mut Params,
    ) -> Result<Pulled, Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.pull(token, params).await,
            // They are those of the step already.
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => {
                rank.is_open = true;
                Ok(Pulled::Pulled { step: params.step() })
            }
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.pull(token, params).await,
        }
    }

    pub(super) fn gradients(&mut self) -> Gradients {
        match self {
            ReplicaWorker::Servers(worker) => worker.gradients(),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => {
                rank.gradients.take().unwrap_or_else(|| rank.worker.gradients())
            }
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.gradients(),
        }
    }

    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "a ring changes them"))]
    pub(super) async fn push(
        &mut self,
        token: Token,
        gradients: Gradients,
        params: &mut Params,
    ) -> Result<Push, Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.push(token, gradients).await,
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.push(gradients, params).await,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.push(token, gradients).await,
        }
    }

    /// Begins a push whose gradients are sent one by one.
    pub(super) async fn begin(&mut self, token: Token) -> Result<ReplicaStream, Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.begin(token).await.map(ReplicaStream::Servers),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.worker.begin(true).map(|()| ReplicaStream::Ring),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => {
                Ok(ReplicaStream::Collected(Box::new((token, rank.worker.gradients()))))
            }
        }
    }

    /// Sends the gradient of a dense variable.
    pub(super) async fn send_variable<T: Element>(
        &mut self,
        stream: &mut ReplicaStream,
        name: &str,
        gradient: &[T],
    ) -> Result<(), Error> {
        match (self, stream) {
            (_, ReplicaStream::Servers(push)) => push.variable(name, gradient).await,
            #[cfg(feature = "ring")]
            (ReplicaWorker::Ring(rank), ReplicaStream::Ring) => {
                rank.worker.stream_variable(name, gradient)
            }
            #[cfg(feature = "ring")]
            (_, ReplicaStream::Collected(step)) => Ok(step.1.collect_variable(name, gradient)?),
            #[cfg(feature = "ring")]
            (_, ReplicaStream::Ring) => Err(FOREIGN_STREAM),
        }
    }

    /// Sends the gradient of a sparse variable.
    pub(super) async fn send_rows<T: Element>(
        &mut self,
        stream: &mut ReplicaStream,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        match stream {
            ReplicaStream::Servers(push) => push.rows(name, ids, rows).await,
            // A ring has no sparse variables.
            #[cfg(feature = "ring")]
            ReplicaStream::Ring => Err(ViewError::Dense { name: name.to_owned() }.into()),
            #[cfg(feature = "ring")]
            ReplicaStream::Collected(step) => Ok(step.1.collect_rows(name, ids, rows)?),
        }
    }

    /// Ends a push whose gradients were sent one by one.
    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "a ring changes them"))]
    pub(super) async fn finish_stream(
        &mut self,
        stream: ReplicaStream,
        params: &mut Params,
    ) -> Result<Push, Error> {
        match (self, stream) {
            (_, ReplicaStream::Servers(push)) => push.finish().await,
            #[cfg(feature = "ring")]
            (ReplicaWorker::Ring(rank), ReplicaStream::Ring) => rank.finish_stream(params).await,
            #[cfg(feature = "ring")]
            (ReplicaWorker::DenseByRing(rank), ReplicaStream::Collected(step)) => {
                let (token, gradients) = *step;
                rank.push(token, gradients).await
            }
            #[cfg(feature = "ring")]
            (_, ReplicaStream::Ring | ReplicaStream::Collected(_)) => Err(FOREIGN_STREAM),
        }
    }

    /// Drops what a rank of a ring has of a step that was not finished.
    pub(super) fn drop_stream(&mut self) {
        #[cfg(feature = "ring")]
        if let ReplicaWorker::Ring(rank) = self {
            rank.drop_stream();
        }
    }

    pub(super) async fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.resume(sequence).await,
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => Err(Error::UnknownPush { sequence }),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.resume(sequence).await,
        }
    }

    pub(super) async fn average(&mut self, params: &mut Params, steps: u64) -> Result<(), Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.average(params, steps).await,
            // Each step does.
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => Ok(()),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.average(params, steps).await,
        }
    }

    pub(super) async fn publish(&mut self, params: &Params) -> Result<(), Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.publish(params).await,
            // Each save does.
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => Ok(()),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.publish(params).await,
        }
    }

    /// Begins a save. A rank of a ring writes it at once.
    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "a ring saves them"))]
    pub(super) fn start_save(&mut self, params: &Params) -> SaveHandle {
        match self {
            ReplicaWorker::Servers(worker) => worker.start_save(b""),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => {
                let doing = "save a checkpoint";
                let saved = rank.worker.save(params, b"");
                SaveHandle::ended(saved.and_then(|saved| saved.ok_or(Error::Ended { doing })))
            }
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.start_save(b""),
        }
    }

    /// Ends the training for all replicas. `ends_servers` says whether the servers of a ring end, too.
    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "a ring needs them"))]
    pub(super) async fn finish(
        &mut self,
        params: &mut Params,
        ends_servers: bool,
    ) -> Result<(), Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.finish().await,
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.finish(params).await,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.finish(ends_servers).await,
        }
    }

    pub(super) async fn await_end(&mut self) -> Result<(), Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.await_end().await,
            // All ranks have agreed on it.
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) | ReplicaWorker::DenseByRing(_) => Ok(()),
        }
    }

    pub(super) async fn pull_newest(
        &mut self,
        params: &mut Params,
        at_least: u64,
    ) -> Result<u64, Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.pull_newest(params, at_least).await,
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => Ok(params.step()),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.pull_newest(params, at_least).await,
        }
    }

    pub(super) fn restored(&self) -> Option<&RestoredCheckpoint> {
        match self {
            ReplicaWorker::Servers(worker) => worker.restored(),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.worker.restored(),
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.restored(),
        }
    }

    pub(super) fn metrics(&self) -> WorkerMetrics {
        match self {
            ReplicaWorker::Servers(worker) => worker.metrics(),
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(rank) => rank.metrics,
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.metrics(),
        }
    }

    pub(super) fn limit_operations(&self, limit: Option<Instant>) {
        match self {
            ReplicaWorker::Servers(worker) => worker.limit_operations(limit),
            // A ring has limits of its own.
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(_) => {}
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.worker.limit_operations(limit),
        }
    }

    /// Leaves. A rank whose training has failed ends it on all ranks.
    pub(super) async fn leave(self) -> Result<(), Error> {
        match self {
            ReplicaWorker::Servers(worker) => worker.leave().await,
            #[cfg(feature = "ring")]
            ReplicaWorker::Ring(mut rank) => {
                if !rank.has_ended {
                    rank.worker.give_up("its training has ended alone").await;
                }
                rank.worker.leave().await;
                Ok(())
            }
            #[cfg(feature = "ring")]
            ReplicaWorker::DenseByRing(rank) => rank.leave().await,
        }
    }
}

/// A session on a ring stays there.
#[cfg(feature = "ring")]
const FOREIGN_STREAM: Error = Error::NotJoined { doing: "push" };
