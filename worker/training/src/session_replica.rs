//! [`SessionReplica`]: the worker of a training session, through all its joins.

use std::time::{Duration, Instant};

use pushpull_common::data_set::DataSet;
use pushpull_common::variable::VariableSpec;
#[cfg(feature = "ring")]
use pushpull_worker::internal::RingWorker;
use pushpull_worker::internal::{LocalValues, SaveHandle};
use pushpull_worker::{Error, Interrupt, Params, Worker, WorkerConfig, WorkerMetrics};

#[cfg(feature = "ring")]
use super::dense_rank::DenseRank;
use super::replica_worker::ReplicaWorker;
#[cfg(feature = "ring")]
use super::replica_worker::RingRank;
use super::training_config::{FillValues, TrainingPlace};

/// The worker of a training session: it joins, joins again after servers were lost, and leaves.
///
/// Every wait ends soon after the interrupt is raised.
///
/// Invariants: there is one worker at most, so a new one connects only after the old session has
/// ended. The local values are kept from the loss of one join to the next.
#[derive(Debug)]
pub(super) struct SessionReplica {
    config: WorkerConfig,
    variables: Vec<VariableSpec>,
    fill: FillValues,
    pub(super) interrupt: Interrupt,
    pub(super) joined: Option<JoinedWorker>,
    /// Where the replica trains.
    #[cfg(feature = "ring")]
    place: TrainingPlace,
    /// A rank whose ring is over, until it is in another.
    #[cfg(feature = "ring")]
    apart: Option<JoinedWorker>,
    /// The worker after the end, until it has left.
    leaving: Option<ReplicaWorker>,
    /// The replica's local values while it joins again.
    local_values: Option<LocalValues>,
    /// The metrics of the workers before the present one.
    past: WorkerMetrics,
}

/// A worker that has joined, and its values.
#[derive(Debug)]
pub(super) struct JoinedWorker {
    pub(super) worker: ReplicaWorker,
    pub(super) params: Params,
}

impl SessionReplica {
    #[cfg_attr(not(feature = "ring"), expect(unused_variables, reason = "it is always servers"))]
    pub(super) fn new(
        config: WorkerConfig,
        variables: Vec<VariableSpec>,
        fill: FillValues,
        place: TrainingPlace,
    ) -> SessionReplica {
        let interrupt = config.interrupt.clone().unwrap_or_default();
        SessionReplica {
            config,
            variables,
            fill,
            interrupt,
            joined: None,
            #[cfg(feature = "ring")]
            place,
            #[cfg(feature = "ring")]
            apart: None,
            leaving: None,
            local_values: None,
            past: WorkerMetrics::default(),
        }
    }

    pub(super) fn is_chief(&self) -> bool {
        let joined = self.joined.as_ref().map(|joined| &joined.worker);
        joined.map_or(self.config.is_chief(), ReplicaWorker::is_chief)
    }

    /// The worker and the values of a step.
    pub(super) fn of_step(&mut self) -> &mut JoinedWorker {
        self.joined.as_mut().expect("a step borrows a session that has joined")
    }

    /// Returns the data set that the worker declares.
    pub(super) fn declared_data(&self) -> Option<&DataSet> {
        self.config.data.as_ref()
    }

    /// Joins within this time. The local values survive, unless the servers have lost their state.
    /// Returns `None` if the interrupt was raised.
    pub(super) async fn join(
        &mut self,
        within: Duration,
        has_lost_state: bool,
    ) -> Option<Result<&JoinedWorker, Error>> {
        #[cfg(feature = "ring")]
        match self.place {
            TrainingPlace::Servers => {}
            TrainingPlace::Ring(_) => return self.join_ring().await,
            TrainingPlace::DenseByRing(_) => match self.renew_dense_ring().await? {
                Err(error) => return Some(Err(error)),
                Ok(true) => return self.joined.as_ref().map(Ok),
                Ok(false) => {}
            },
        }
        // The old session ends first: the new incarnation fences it.
        if let Some(JoinedWorker { worker, params }) = self.joined.take() {
            let of_servers = worker.of_servers();
            self.local_values = of_servers.and_then(|it| LocalValues::kept(&params, it));
            self.past = self.past.plus(worker.metrics());
            #[cfg(feature = "ring")]
            if let ReplicaWorker::DenseByRing(rank) = worker {
                self.place = TrainingPlace::DenseByRing(Some(rank.ring));
            }
        }
        if has_lost_state {
            self.local_values = None;
        }
        let timeout = self.config.connect_timeout.min(within);
        let mut config = self.config.clone();
        config.limit = Instant::now().checked_add(within);
        let variables = &self.variables;
        let fill = &mut self.fill.0;
        let attempt = async {
            let mut worker = Worker::connect(config.connect_timeout(timeout)).await?;
            let params = worker.join(variables, fill).await?;
            worker.limit_operations(None);
            Ok((worker, params))
        };
        let (worker, mut params) = match self.interrupt.race(attempt).await? {
            Ok(joined) => joined,
            Err(error) => return Some(Err(error)),
        };
        if let Some(values) = self.local_values.take() {
            values.restore(&mut params, &worker);
        }
        let worker = self.placed(worker);
        Some(Ok(self.joined.insert(JoinedWorker { worker, params })))
    }

    /// Returns a worker that has joined, in the ring of its dense gradients if there is one.
    fn placed(&mut self, worker: Worker) -> ReplicaWorker {
        #[cfg(feature = "ring")]
        if let TrainingPlace::DenseByRing(ring) = &mut self.place
            && let Some(ring) = ring.take()
        {
            return ReplicaWorker::DenseByRing(Box::new(DenseRank { worker, ring }));
        }
        ReplicaWorker::Servers(Box::new(worker))
    }

    /// Forms the ring of the dense gradients again with the ranks that are left, if it is over.
    /// Returns whether the worker has stayed joined meanwhile; otherwise it must join again.
    #[cfg(feature = "ring")]
    async fn renew_dense_ring(&mut self) -> Option<Result<bool, Error>> {
        let Some(mut joined) = self.joined.take().or_else(|| self.apart.take()) else {
            // A session that has lost its ring does not train without it.
            return Some(match self.place {
                TrainingPlace::DenseByRing(None) => {
                    Err(Error::NotJoined { doing: "join the ring" })
                }
                _ => Ok(false),
            });
        };
        let mut stays = false;
        if let ReplicaWorker::DenseByRing(rank) = &mut joined.worker
            && rank.ring.is_over()
        {
            let recovered = self.interrupt.race(rank.ring.recover()).await;
            stays = !rank.worker.has_failed();
            if !matches!(recovered, Some(Ok(()))) {
                self.apart = Some(joined);
                return recovered.map(|recovered| recovered.map(|()| false));
            }
        }
        self.joined = Some(joined);
        Some(Ok(stays))
    }

    /// Begins the training on the ring, or goes on with the ranks that are left.
    #[cfg(feature = "ring")]
    async fn join_ring(&mut self) -> Option<Result<&JoinedWorker, Error>> {
        let doing = "join the ring";
        if let Some(mut joined) = self.joined.take().or_else(|| self.apart.take())
            && let ReplicaWorker::Ring(rank) = &mut joined.worker
        {
            return match self.interrupt.race(rank.recover(&mut joined.params)).await? {
                Ok(()) => Some(Ok(self.joined.insert(joined))),
                Err(error) => {
                    self.apart = Some(joined);
                    Some(Err(error))
                }
            };
        }
        let TrainingPlace::Ring(start) = &mut self.place else {
            return Some(Err(Error::NotJoined { doing }));
        };
        // A training that could not begin does not begin again: its ring is gone.
        let Some((ring, config)) = start.take().map(|start| *start) else {
            return Some(Err(Error::NotJoined { doing }));
        };
        let config = config.variables(self.variables.iter().cloned());
        let fill = &mut self.fill.0;
        let begun = self.interrupt.race(RingWorker::join(ring, config, fill)).await?;
        Some(begun.map(|(worker, params)| {
            let worker = ReplicaWorker::Ring(Box::new(RingRank::new(worker)));
            &*self.joined.insert(JoinedWorker { worker, params })
        }))
    }

    /// Returns the metrics of this session, through all its joins.
    pub(super) fn metrics(&self) -> WorkerMetrics {
        let joined = self.joined.as_ref().map(|joined| &joined.worker);
        let worker = joined.or(self.leaving.as_ref());
        worker.map_or(self.past, |worker| self.past.plus(worker.metrics()))
    }

    /// Limits all later operations, but for checkpoints, to this moment; `None` removes the limit.
    pub(super) fn limit(&self, limit: Option<Instant>) {
        let joined = self.joined.as_ref().map(|joined| &joined.worker);
        if let Some(worker) = joined.or(self.leaving.as_ref()) {
            worker.limit_operations(limit);
        }
    }

    /// Averages the means after this many steps; `None` if the interrupt was raised.
    pub(super) async fn average(&mut self, steps: u64) -> Option<Result<(), Error>> {
        let JoinedWorker { worker, params } = self.joined.as_mut()?;
        self.interrupt.race(worker.average(params, steps)).await
    }

    /// Gives the servers the chief's local values; `None` if the worker has not joined.
    pub(super) async fn publish(&mut self) -> Option<Result<(), Error>> {
        let JoinedWorker { worker, params } = self.joined.as_mut()?;
        let published = self.interrupt.race_with_grace(worker.publish(params)).await;
        Some(published.unwrap_or(Err(Error::Interrupted { doing: "publish" })))
    }

    /// Asks the servers for a checkpoint.
    pub(super) fn start_save(&mut self) -> Option<SaveHandle> {
        let JoinedWorker { worker, params } = self.joined.as_mut()?;
        Some(worker.start_save(params))
    }

    /// Finishes the training for all workers. Without an answer the other workers may go on.
    /// `ends_servers` says whether the servers of a ring end as well.
    pub(super) async fn finish(&mut self, ends_servers: bool) -> Result<(), Error> {
        let doing = "finish the training";
        let Some(joined) = &mut self.joined else { return Err(Error::NotJoined { doing }) };
        let JoinedWorker { worker, params } = joined;
        let finished = self.interrupt.race_with_grace(worker.finish(params, ends_servers)).await;
        finished.unwrap_or(Err(Error::Interrupted { doing }))
    }

    /// Waits until the training has ended on all workers.
    pub(super) async fn await_end(&mut self) -> Result<(), Error> {
        let doing = "wait for the end of the training";
        let Some(joined) = &mut self.joined else { return Err(Error::NotJoined { doing }) };
        let ended = self.interrupt.race(joined.worker.await_end()).await;
        ended.unwrap_or(Err(Error::Interrupted { doing }))
    }

    /// Pulls the newest values, of this step or a later one, and returns their step. Without an
    /// answer the values of the last step stay.
    pub(super) async fn refresh(&mut self, at_least: u64) -> Result<u64, Error> {
        let doing = "pull";
        let Some(joined) = &mut self.joined else { return Err(Error::NotJoined { doing }) };
        let JoinedWorker { worker, params } = joined;
        let pulled = self.interrupt.race(worker.pull_newest(params, at_least)).await;
        pulled.unwrap_or(Err(Error::Interrupted { doing }))
    }

    /// Ends the use of the values, and returns them. The worker has not left.
    pub(super) fn end(&mut self) -> Option<Params> {
        let joined = self.joined.take().map(|joined| (joined.worker, joined.params));
        let (worker, params) = joined.unzip();
        self.leaving = worker;
        params
    }

    /// Leaves, after the end or without one.
    pub(super) async fn leave(&mut self) {
        let joined = self.joined.take().map(|joined| joined.worker);
        if let Some(worker) = self.leaving.take().or(joined) {
            // A server that does not hear it notices when the lease expires.
            self.past = self.past.plus(worker.metrics());
            let _ = self.interrupt.race_with_grace(worker.leave()).await;
        }
        // Its worker has not joined the servers again.
        #[cfg(feature = "ring")]
        if let TrainingPlace::DenseByRing(ring) = &mut self.place
            && let Some(mut ring) = ring.take()
        {
            ring.give_up("its training has ended without servers").await;
            ring.leave().await;
        }
    }
}
