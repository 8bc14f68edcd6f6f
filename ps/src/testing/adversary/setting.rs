//! The shard that an adversary plays against: its configuration and its variables.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::error::Chain;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::initializer::Initializer;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::message::{BodyCrc, Hello, Role};
use pushpull_common::protocol::version;
use pushpull_common::protocol::wire::Text;
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adam, Sgd};
use pushpull_store::arena::{ArenaStorage, Budget};
use pushpull_store::testing::test_files::TestFiles;

use super::choices::Choices;
use crate::config::{
    Asynchronous, Network, NonFinite, PsConfig, StalenessPolicy, Storage, Synchronous,
};
use crate::metrics::Counters;
use crate::shard::Shard;
use crate::shard::opening::shard_setup::{ServerRun, ShardSetup};

/// The maximum memory of the shard.
const BYTES_MAX: u64 = 16 << 20;

/// The bytes of a block: few, so that small variables have several blocks.
const BLOCK_BYTES: usize = 256;

/// The lease of a member.
pub(super) const LEASE: Duration = Duration::from_millis(500);

/// A shard of a random configuration.
pub(super) struct ShardSetting {
    pub(super) config: Arc<PsConfig>,
    pub(super) id: ShardId,
    pub(super) catalogue: Arc<Catalogue>,
    /// Other catalogues that peers declare: an empty one, one that does not fit into memory, and
    /// one with shards on a task outside the cluster.
    pub(super) others: [Catalogue; 3],
}

impl ShardSetting {
    /// Draws a setting.
    pub(super) fn draw(choices: &mut Choices<'_>) -> ShardSetting {
        let shards = 1 + u16::from(choices.one_in(2));
        let id = ShardId { task: 0, shard: choices.below(usize::from(shards)) as u16 };
        let config = Arc::new(config(choices, shards));
        let variables = variables(choices);
        let large = VariableSpec::f32("large", [BYTES_MAX / 4]).expect("a large variable");
        let others = [
            catalogue(Vec::new(), &[0], shards),
            catalogue(vec![large], &[0], shards),
            catalogue(variables.clone(), &[0, 1], shards),
        ];
        let catalogue = Arc::new(catalogue(variables, &[0], shards));
        ShardSetting { config, id, catalogue, others }
    }

    /// Returns the hello of an honest peer.
    pub(super) fn hello(&self, role: Role, task: u32) -> Hello {
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role,
            job: Text::clipped("worker"),
            task,
            shard: self.id,
            incarnation: Incarnation(100 + u64::from(task)),
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_arena: 0,
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: Identity::new().to_wire(),
            auth: None,
            features: Default::default(),
        }
    }

    /// Opens the shard in these test files, or creates it.
    pub(super) fn open(
        &self,
        test_files: &TestFiles,
        counters: &Arc<Counters>,
        now: Instant,
    ) -> Shard {
        let identity = Arc::new(Identity::new());
        let counters = counters.clone();
        let config = self.config.clone();
        let budget = Budget::new(BYTES_MAX);
        let parts = ShardSetup { id: self.id, config, identity, budget, counters };
        let life = ServerRun { boot: [0; 16], arena: 1, epoch_base: 0 };
        let opened = Shard::open(parts, ArenaStorage::TestFiles(test_files.clone()), life, now);
        opened
            .unwrap_or_else(|error| panic!("a shard cannot open its own files: {}", Chain(&error)))
    }
}

/// Returns the catalogue of variables that are placed on the shards of these tasks.
fn catalogue(variables: Vec<VariableSpec>, tasks: &[u32], shards: u16) -> Catalogue {
    let map = ShardMap::new(tasks.to_vec(), shards).expect("there are shards");
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin);
    let placement = placement.expect("the variables can be placed");
    Catalogue::new(variables, &placement).expect("the variables are valid")
}

fn variables(choices: &mut Choices<'_>) -> Vec<VariableSpec> {
    let shape = |extents: &[u64]| Shape::new(extents.to_vec()).expect("a small shape");
    let of = |name, dtype, extents| {
        VariableSpec::new(name, dtype, shape(extents)).expect("a small variable")
    };
    let mut variables = vec![
        of("w", DType::F32, &[3]),
        of("d", DType::F64, &[2]),
        of("ledger", DType::F32, &[4]).plain(),
        of("n", DType::I64, &[1]),
        of("long", DType::F32, &[150]).initializer(Initializer::Ones),
        of("none", DType::F32, &[0]),
    ];
    if choices.one_in(2) {
        variables.push(of("h", DType::Bf16, &[5]));
        variables.push(of("rows", DType::F32, &[6, 2]).sparse());
    }
    if choices.one_in(4) {
        let spec = TableSpec::new(64 << 10).rows_at_once(4);
        variables.push(VariableSpec::table("ids", DType::F32, [2], spec).expect("a small table"));
    }
    variables
}

fn config(choices: &mut Choices<'_>, shards: u16) -> PsConfig {
    let cluster = ClusterSpec::builder().job("ps", ["localhost:1"]).build();
    let cluster = cluster.expect("one task with an address is a cluster");
    let config = match choices.one_in(3) {
        true => PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.1)),
        false => PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0)),
    };
    let policies = [NonFinite::Reject, NonFinite::Count, NonFinite::Allow];
    let mut config = config
        .shards(shards)
        .lease(LEASE)
        .token_timeout(choices.one_in(2).then_some(3 * LEASE))
        .inbox_pushes(1 + choices.below(3))
        .network(Network::default().connections_max(6))
        .non_finite(policies[choices.below(3)])
        .storage(Storage::memory().integrity_full(choices.one_in(4)));
    config.block_bytes = BLOCK_BYTES;
    config.last_step = choices.one_in(4).then(|| choices.below(8) as u64 + 1);
    if choices.one_in(2) {
        let total = 1 + choices.below(3) as u32;
        let aggregate = 1 + choices.below(total as usize) as u32;
        let mode = Synchronous::new(aggregate)
            .total_num_replicas(total)
            .deterministic(aggregate == total && choices.one_in(3));
        config = config.mode(match choices.one_in(3) {
            true => mode.clip_by_global_norm(0.5),
            false => mode,
        });
    } else {
        let mut mode = Asynchronous {
            wait_ahead: choices.one_in(4).then_some(1),
            reject_older: choices.one_in(4).then(|| choices.below(2) as u64),
            ..Asynchronous::default()
        };
        if choices.one_in(4) {
            mode.staleness = StalenessPolicy::DelayCompensation { lambda: 0.5 };
        }
        config = config.mode(mode);
    }
    config.check().expect("the configuration is valid");
    config
}
