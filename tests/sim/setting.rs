//! The configuration of a seed's cluster.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::data_set::DataSet;
use pushpull_common::ids::TaskId;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::Features;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_ps::testing::{SimulatedTokens, with_features};
use pushpull_ps::{Asynchronous, Mode, Network, OnLoss, PsConfig, Sgd, Storage, Synchronous};
use pushpull_services::planted::PlantedServiceBugs;

use crate::chance::SimChance;
use crate::scenario::Sizes;

/// The learning rate. It is a power of two, so multiplying by it does not round.
pub(crate) const RATE: f64 = 0.5;

/// The lease: how long a silent member stays.
pub(crate) const LEASE: Duration = Duration::from_millis(1000);

/// The maximum of pinned bytes where it is tight: the size of one block.
const PIN_BYTES: u64 = 256;

/// The memory of most push slots.
const PUSH_SLOT_BYTES: u64 = 4096;

/// How long an update waits for memory that a slow pull pins before the pull is cut off.
const STALL: Duration = Duration::from_millis(700);

/// The configuration of a cluster and the length of its training.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) seed: u64,
    pub(crate) tasks: u32,
    pub(crate) shards: u16,
    pub(crate) workers: u32,
    pub(crate) aggregate: u32,
    pub(crate) total: u32,
    pub(crate) last_step: u64,
    /// The data set that the training consumes, instead of ending at the last step.
    pub(crate) data: Option<DataSet>,
    pub(crate) token_timeout: Option<Duration>,
    /// Whether a step sums its gradients in the order of the worker tasks.
    pub(crate) deterministic: bool,
    pub(crate) on_loss: OnLoss,
    /// The norm to which larger gradients are clipped, in synchronous mode.
    pub(crate) clip: Option<f64>,
    /// Whether the cluster runs in asynchronous mode.
    pub(crate) asynchronous: bool,
    pub(crate) inbox_pushes: usize,
    /// The bounds on staleness, in asynchronous mode.
    pub(crate) wait_ahead: Option<u64>,
    pub(crate) reject_older: Option<u64>,
    /// The largest part of a push, or of the values of a pull.
    pub(crate) part_bytes: u64,
    /// Whether same-host workers connect over Unix sockets and use shared memory.
    pub(crate) shares: bool,
    /// Whether shards may pin only [`PIN_BYTES`].
    pub(crate) tight: bool,
    /// The memory that other shards leave to each shard beside its variables, if they leave little.
    pub(crate) spare_bytes: Option<u64>,
    #[cfg(feature = "planted")]
    pub(crate) planted: pushpull_ps::planted::PlantedBugs,
    /// The bug that is planted in function servers and coordinators, if any.
    pub(crate) planted_worker: PlantedServiceBugs,
    pub(crate) cluster: ClusterSpec,
    pub(crate) catalogue: Arc<Catalogue>,
}

impl Setting {
    /// The last step of a training without one.
    pub(crate) const ENDLESS: u64 = u64::MAX;

    /// Returns the features of the protocol that a task's program has: every task may be another
    /// build.
    pub(crate) fn features_of(&self, task: &str) -> Features {
        let chance = &mut SimChance::of(self.seed, &format!("features of {task}"));
        match chance.percent(40) {
            true => Features::ALL,
            false => Features(chance.next() & Features::ALL.0),
        }
    }

    /// Returns the access tokens by which the processes of the cluster prove to each other who they are;
    /// `None` if nobody asks.
    pub(crate) fn tokens(&self) -> Option<SimulatedTokens> {
        let asks = SimChance::of(self.seed, "tokens").percent(50);
        let line = |name: &str, index: u32, roles: &str, job: &str| {
            // Each has a secret of its own.
            let secret = format!("{index:08x}").repeat(4) + &format!("{:08x}", name.len());
            format!("token {name}-{index} {secret} roles={roles} tasks=/job:{job}/task:{index}\n")
        };
        let servers = (0..self.tasks).map(|index| line("ps", index, "peer", "ps"));
        let workers = (0..self.workers).map(|index| {
            let roles = if index == 0 { "worker,chief" } else { "worker" };
            line("worker", index, roles, "worker")
        });
        let coordinator = line("coordinates", 0, "reader,client functions=*", "coordinator");
        let lines: String = servers.chain(workers).chain([coordinator]).collect();
        asks.then(|| SimulatedTokens::new(&lines))
    }

    /// Draws the setting of a seed, bounded by `at_most`. The bound does not change later draws.
    pub(crate) fn draw(seed: u64, at_most: Sizes) -> Setting {
        let chance = &mut SimChance::of(seed, "setting");
        let drawn = Sizes {
            tasks: chance.between(1, 3),
            shards: chance.between(1, 2),
            workers: chance.between(2, 4),
            variables: chance.between(2, 6),
            steps: chance.between(8, 24),
        };
        let sizes = drawn.min(at_most);
        let tasks = sizes.tasks as u32;
        let shards = sizes.shards as u16;
        let workers = sizes.workers as u32;
        // Sometimes the cluster has one worker more than `total_num_replicas`.
        let asynchronous = chance.percent(25);
        let deterministic = chance.percent(12) && !asynchronous;
        let fewer = chance.percent(25) && !deterministic && workers > 1;
        let total = if fewer { workers - 1 } else { workers };
        let kind = chance.between(0, 2);
        let draw = chance.next();
        let aggregate = match kind {
            _ if deterministic => total,
            0 => 1 + (draw % u64::from(total)) as u32,
            1 => total,
            _ => total + 1 + (draw % 2) as u32,
        };
        let policy = chance.between(0, 9);
        let draw = chance.next();
        let on_loss = match policy {
            0..=5 => OnLoss::Shrink { min: 1 },
            6 | 7 => OnLoss::Shrink { min: 1 + (draw % u64::from(aggregate)) as u32 },
            8 => OnLoss::Wait { timeout: Duration::from_millis(100 + draw % 2000) },
            _ => OnLoss::Fail,
        };
        let wait_ahead = Some(chance.between(1, 3)).filter(|_| chance.percent(35));
        let reject_older = Some(chance.between(0, 3)).filter(|_| chance.percent(35));
        let ps: Vec<String> = (0..tasks).map(|task| format!("ps{task}:1")).collect();
        let hosts: Vec<String> = (0..workers).map(|task| format!("worker{task}:1")).collect();
        let clips = &mut SimChance::of(seed, "clip");
        let clip = Some(clips.between(1, 100) as f64).filter(|_| clips.percent(25));
        let shared_values = &mut SimChance::of(seed, "lends");
        let shares = shared_values.percent(50);
        let tight = shares && shared_values.percent(50);
        let memory = &mut SimChance::of(seed, "memory");
        let is_scarce = !shares && memory.percent(50);
        let spare_bytes = is_scarce.then_some(memory.between(0, 2) * PUSH_SLOT_BYTES);
        let data = &mut SimChance::of(seed, "data");
        let consumes = data.percent(40);
        let batch = data.between(1, 3) as u32;
        let samples = data.between(3, 20);
        let epochs = data.between(1, 3);
        // Asynchronous variables have digits for a limited number of pushes.
        let samples = samples.min(sizes.steps);
        let epochs = epochs.min(1 + sizes.steps / 8);
        let data = DataSet::new("data", samples.max(3), batch).map(|set| set.epochs(epochs));
        let data = data.expect("a batch has at most 3 samples");
        let cluster = ClusterSpec::builder().job("ps", ps).job("worker", hosts).build();
        let cluster = cluster.expect("every task has an address");
        let catalogue = placed(variables(sizes.variables as usize, asynchronous), &cluster, shards);
        Setting {
            seed,
            tasks,
            shards,
            workers,
            aggregate,
            total,
            last_step: sizes.steps,
            data: consumes.then_some(data),
            token_timeout: chance.percent(60).then_some(Duration::from_millis(1500)),
            deterministic,
            on_loss,
            clip: clip.filter(|_| !asynchronous),
            asynchronous,
            inbox_pushes: if asynchronous { chance.between(1, 3) as usize } else { 1 },
            wait_ahead: wait_ahead.filter(|_| asynchronous),
            reject_older: reject_older.filter(|_| asynchronous),
            part_bytes: if chance.percent(50) { 8 * chance.between(8, 32) } else { 1 << 20 },
            shares,
            tight,
            spare_bytes,
            #[cfg(feature = "planted")]
            planted: Default::default(),
            planted_worker: PlantedServiceBugs::default(),
            cluster,
            catalogue,
        }
    }

    /// Returns the sizes of the cluster and its training.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            tasks: self.tasks.into(),
            shards: self.shards.into(),
            workers: self.workers.into(),
            variables: self.catalogue.variables().len() as u64,
            steps: self.last_step,
        }
    }

    /// Describes the setting in one line.
    pub(crate) fn words(&self) -> String {
        format!(
            "{} ps tasks of {} shards, {} workers, {} variables in parts of {}, {}, {} steps, \
             token timeout {:?}, shared memory: {}, tight: {}, spare memory: {:?}, data: {:?}",
            self.tasks,
            self.shards,
            self.workers,
            self.catalogue.variables().len(),
            self.part_bytes,
            self.mode(),
            if self.last_step == Setting::ENDLESS {
                "endless".to_owned()
            } else {
                self.last_step.to_string()
            },
            self.token_timeout,
            self.shares,
            self.tight,
            self.spare_bytes,
            self.data,
        )
    }

    /// Whether steps wait for replicas that are gone.
    pub(crate) fn waits(&self) -> bool {
        let shrinks = self.on_loss == OnLoss::Shrink { min: 1 };
        !self.asynchronous && (self.deterministic || !shrinks)
    }

    fn mode(&self) -> String {
        match (self.asynchronous, self.deterministic) {
            (true, _) => format!(
                "asynchronous with {} push slots, wait_ahead {:?}, reject_older {:?}",
                self.inbox_pushes, self.wait_ahead, self.reject_older
            ),
            (_, true) => format!(
                "all {} in task order, clip {:?}, {:?}",
                self.total, self.clip, self.on_loss
            ),
            _ => format!(
                "{} of {}, clip {:?}, {:?}",
                self.aggregate, self.total, self.clip, self.on_loss
            ),
        }
    }

    /// Returns the configuration of a ps task.
    pub(crate) fn config(&self, task: u32) -> PsConfig {
        let storage = match self.tight {
            true => Storage::memory().pin_bytes_max(PIN_BYTES),
            false => Storage::memory(),
        };
        let config = PsConfig::new(self.cluster.clone(), TaskId::ps(task), Sgd::new(RATE));
        #[cfg(feature = "planted")]
        let config = config.planted(self.planted);
        let config = match self.data {
            None if self.last_step != Setting::ENDLESS => config.last_step(self.last_step),
            _ => config,
        };
        let config = config
            .shards(self.shards)
            .mode(self.ps_mode())
            .storage(storage)
            .lease(LEASE)
            .network(Network::default().stall_timeout(STALL))
            .token_timeout(self.token_timeout)
            .inbox_pushes(self.inbox_pushes);
        with_features(config, self.features_of(&TaskId::ps(task).to_string()))
    }

    fn ps_mode(&self) -> Mode {
        if self.asynchronous {
            let mut mode = Asynchronous::default();
            if let Some(gradients) = self.wait_ahead {
                mode = mode.wait_ahead(gradients);
            }
            if let Some(steps) = self.reject_older {
                mode = mode.reject_older(steps);
            }
            return mode.into();
        }
        let mode = Synchronous::new(self.aggregate)
            .total_num_replicas(self.total)
            .on_loss(self.on_loss)
            .join_timeout(Duration::from_secs(2))
            .deterministic(self.deterministic);
        match self.clip {
            Some(bound) => mode.clip_by_global_norm(bound).into(),
            None => mode.into(),
        }
    }
}

/// Places variables on the shards of a cluster, in turn.
pub(crate) fn placed(
    variables: Vec<VariableSpec>,
    cluster: &ClusterSpec,
    shards: u16,
) -> Arc<Catalogue> {
    let map = ShardMap::of_cluster(cluster, shards).expect("there are shards");
    let placed = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin);
    let placed = placed.expect("any variable can be placed");
    Arc::new(Catalogue::new(variables, &placed).expect("the names differ"))
}

/// Returns small variables of both types, one of them with several blocks. In asynchronous mode
/// each has enough elements for the digits of all pushes.
fn variables(count: usize, asynchronous: bool) -> Vec<VariableSpec> {
    let shapes = match asynchronous {
        true => [(30, false), (12, true), (150, false), (15, true), (40, false), (70, true)],
        false => [(3, false), (2, true), (150, false), (5, true), (1, false), (70, true)],
    };
    let specs = shapes.iter().take(count).enumerate().map(|(index, &(length, double))| {
        let dtype = if double { DType::F64 } else { DType::F32 };
        let shape = Shape::new([length]).expect("a small shape");
        VariableSpec::new(format!("v{index}"), dtype, shape).expect("a sound variable")
    });
    specs.collect()
}
