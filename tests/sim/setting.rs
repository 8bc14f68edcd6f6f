//! What a seed's cluster is made of.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::TaskId;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_ps::{Mode, OnLoss, PsConfig, Sgd};

use crate::chance::Chance;
use crate::scenario::Sizes;

/// The learning rate: a power of two, so that it rounds nothing.
pub(crate) const RATE: f64 = 0.5;

/// How long a member may be silent.
pub(crate) const LEASE: Duration = Duration::from_millis(1000);

/// The memory for what is changed while it is read, where there is hardly any.
const PIN_BYTES: u64 = 256;

/// How long a worker may be at one pull in lent memory.
const STALL: Duration = Duration::from_millis(700);

/// A cluster, and how long its training is.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) seed: u64,
    pub(crate) tasks: u32,
    pub(crate) shards: u16,
    pub(crate) workers: u32,
    pub(crate) aggregate: u32,
    pub(crate) total: u32,
    pub(crate) last_step: u64,
    pub(crate) token_timeout: Option<Duration>,
    /// Whether gradients are added up in the order of the worker tasks.
    pub(crate) deterministic: bool,
    pub(crate) on_loss: OnLoss,
    /// To which norm longer gradients are scaled down, in synchronous mode.
    pub(crate) clip: Option<f64>,
    /// Whether each push is applied by itself.
    pub(crate) asynchronous: bool,
    inbox_pushes: usize,
    /// The bounds of staleness, in asynchronous mode.
    wait_ahead: Option<u64>,
    pub(crate) reject_older: Option<u64>,
    /// The largest part of a push, or of the values of a pull.
    pub(crate) part_bytes: u64,
    /// Whether workers on the servers' host have come over Unix sockets, and are lent memory.
    pub(crate) shares: bool,
    /// Whether shards have hardly any memory for what is changed while it is read.
    tight: bool,
    #[cfg(feature = "planted")]
    pub(crate) planted: pushpull_ps::PlantedBugs,
    pub(crate) cluster: ClusterSpec,
    pub(crate) catalogue: Arc<Catalogue>,
}

impl Setting {
    /// That of a seed, no larger than this. What is drawn does not depend on the bound.
    pub(crate) fn draw(seed: u64, at_most: Sizes) -> Setting {
        let chance = &mut Chance::of(seed, "setting");
        let drawn = Sizes {
            tasks: chance.between(1, 3),
            shards: chance.between(1, 2),
            workers: chance.between(2, 4),
            variables: chance.between(2, 6),
            steps: chance.between(8, 24),
        };
        let sizes = drawn.min(at_most);
        let (tasks, shards) = (sizes.tasks as u32, sizes.shards as u16);
        let workers = sizes.workers as u32;
        // Sometimes more come than are expected.
        let asynchronous = chance.percent(25);
        let deterministic = chance.percent(12) && !asynchronous;
        let fewer = chance.percent(25) && !deterministic && workers > 1;
        let total = if fewer { workers - 1 } else { workers };
        let (kind, draw) = (chance.between(0, 2), chance.next());
        let aggregate = match kind {
            _ if deterministic => total,
            0 => 1 + (draw % u64::from(total)) as u32,
            1 => total,
            _ => total + 1 + (draw % 2) as u32,
        };
        let (policy, draw) = (chance.between(0, 9), chance.next());
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
        let clips = &mut Chance::of(seed, "clip");
        let clip = Some(clips.between(1, 100) as f64).filter(|_| clips.percent(25));
        let shared_values = &mut Chance::of(seed, "lends");
        let shares = shared_values.percent(50);
        let tight = shares && shared_values.percent(50);
        let cluster = ClusterSpec::builder().job("ps", ps).job("worker", hosts).build();
        let cluster = cluster.expect("every task has an address");
        let variables = variables(sizes.variables as usize, asynchronous);
        let map = ShardMap::of_cluster(&cluster, shards).expect("there are shards");
        let placed = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin);
        let placed = placed.expect("any variable can be placed");
        let catalogue = Catalogue::new(variables, &placed).expect("the names differ");
        Setting {
            seed,
            tasks,
            shards,
            workers,
            aggregate,
            total,
            last_step: sizes.steps,
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
            #[cfg(feature = "planted")]
            planted: Default::default(),
            cluster,
            catalogue: Arc::new(catalogue),
        }
    }

    /// How large it is.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            tasks: self.tasks.into(),
            shards: self.shards.into(),
            workers: self.workers.into(),
            variables: self.catalogue.variables().len() as u64,
            steps: self.last_step,
        }
    }

    /// What it is, in a line.
    pub(crate) fn words(&self) -> String {
        format!(
            "{} ps tasks of {} shards, {} workers, {} variables in parts of {}, {}, {} steps, \
             tokens for {:?}, lends: {}, tight: {}",
            self.tasks,
            self.shards,
            self.workers,
            self.catalogue.variables().len(),
            self.part_bytes,
            self.mode(),
            self.last_step,
            self.token_timeout,
            self.shares,
            self.tight,
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
                "asynchronous with {} push slots, ahead {:?}, older {:?}",
                self.inbox_pushes, self.wait_ahead, self.reject_older
            ),
            (_, true) => format!(
                "all {} in their order, clip {:?}, {:?}",
                self.total, self.clip, self.on_loss
            ),
            _ => format!(
                "{} of {}, clip {:?}, {:?}",
                self.aggregate, self.total, self.clip, self.on_loss
            ),
        }
    }

    /// What the process of a ps task is told.
    pub(crate) fn config(&self, task: u32) -> PsConfig {
        let mode = match self.asynchronous {
            true => Mode::Asynchronous,
            false => Mode::Synchronous {
                replicas_to_aggregate: self.aggregate,
                total_num_replicas: self.total,
            },
        };
        let mut config = PsConfig::new(self.cluster.clone(), TaskId::ps(task), Sgd::new(RATE));
        if let Some(gradients) = self.wait_ahead {
            config = config.wait_ahead(gradients);
        }
        if let Some(steps) = self.reject_older {
            config = config.reject_older(steps);
        }
        if let Some(bound) = self.clip {
            config = config.clip_by_global_norm(bound);
        }
        if self.tight {
            config = config.pin_bytes_max(PIN_BYTES);
        }
        #[cfg(feature = "planted")]
        let config = config.planted(self.planted);
        config
            .shards(self.shards)
            .mode(mode)
            .on_loss(self.on_loss)
            .lease(LEASE)
            .stall_timeout(STALL)
            .join_timeout(Duration::from_secs(2))
            .token_timeout(self.token_timeout)
            .deterministic(self.deterministic)
            .inbox_pushes(self.inbox_pushes)
            .last_step(self.last_step)
    }
}

/// Small ones of both types; one of several blocks. In asynchronous mode they have room for the digits
/// of all pushes.
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
