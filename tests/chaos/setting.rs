//! The settings that the test and its workers share: the cluster and its variables.

use std::path::PathBuf;
use std::time::Duration;

use pushpull::cluster::{PlacementStrategy, ShardId};
use pushpull::error::ViewError;
use pushpull::variable::{DType, Eviction, Partitioner, TableSpec, f16};
use pushpull::{ClusterSpec, Params, TaskId, VariableSpec, WorkerConfig};

/// How many workers train.
pub(crate) const WORKERS: u32 = 3;
/// How many shards a cluster has in all its tasks.
pub(crate) const SHARDS: usize = 4;
/// The elements of one ledger variable, the part of a ledger that one push sends.
pub(crate) const CHUNK: u64 = 1024;
/// The rows of a worker's sparse variable on a shard. A push has one of them. `CHUNK` is a multiple
/// of this, so each part of the ledger uses all rows equally often.
pub(crate) const ROWS: u64 = 64;
/// The elements of a row.
pub(crate) const WIDTH: u64 = 3;
/// The elements of a dense variable. A push of a little over 1 MiB to each shard has more than one
/// part, and applying it takes long enough for kills to hit its middle.
const DENSE: u64 = 256 << 10;

/// The elements of a quarter of the partitioned dense variable with optimizer slots.
pub(crate) const QUARTER: u64 = 1000;
/// The lease in clusters whose tasks are stopped and whose links are cut.
pub(crate) const LEASE: Duration = Duration::from_millis(1_000);
/// The token timeout in those clusters.
pub(crate) const TOKEN_TIMEOUT: Duration = Duration::from_millis(1_800);
/// Longer than the lease and the token timeout, with a margin for a server that checks them only at
/// ticks.
pub(crate) const TOO_LONG: Duration = Duration::from_millis(2_500);

/// One cluster with its variables.
#[derive(Clone, Debug)]
pub(crate) struct ChaosSetting {
    /// The addresses of the servers by task: on which they listen, or at which a worker reaches
    /// them.
    pub(crate) hosts: Vec<String>,
    /// The number of ledger variables of each worker on each shard.
    pub(crate) chunks: u64,
    /// Whether steps are synchronous: each takes the gradients of the two fastest workers.
    pub(crate) synchronous: bool,
    /// Whether lease and token timeout are short, so that workers sometimes exceed the token
    /// timeout.
    pub(crate) expires: bool,
    /// The folder of the cluster, with states, sockets, histories and logs.
    pub(crate) folder: PathBuf,
}

impl ChaosSetting {
    /// Returns how many gradients one step takes.
    pub(crate) fn gradients_per_step(&self) -> u64 {
        if self.synchronous { 2 } else { 1 }
    }

    pub(crate) fn shards_per_task(&self) -> u16 {
        (SHARDS / self.hosts.len()) as u16
    }

    /// Returns the shards of one task.
    pub(crate) fn shards_of(&self, task: usize) -> impl Iterator<Item = ShardId> {
        (0..self.shards_per_task()).map(move |shard| ShardId { task: task as u32, shard })
    }

    pub(crate) fn shard(&self, index: usize) -> ShardId {
        let tasks = self.hosts.len();
        ShardId { task: (index % tasks) as u32, shard: (index / tasks) as u16 }
    }

    pub(crate) fn cluster(&self) -> ClusterSpec {
        let cluster = ClusterSpec::builder().job("ps", &self.hosts);
        cluster.job("worker", worker_hosts()).build().expect("the cluster is correct")
    }

    /// Returns the configuration of a worker, which places by round robin.
    pub(crate) fn worker_config(&self, worker: u32) -> WorkerConfig {
        let config = WorkerConfig::new(self.cluster(), TaskId::worker(worker));
        config.placement(PlacementStrategy::RoundRobin)
    }

    /// Whether ledgers are f16 instead of f32.
    ///
    /// Same-host workers read shared values only if no variable is f16. So clusters on Unix sockets
    /// have f32 ledgers: there a worker may be killed while it reads shared values, and so may the
    /// server.
    pub(crate) fn has_halves(&self) -> bool {
        self.hosts.iter().any(|host| !host.starts_with("unix:"))
    }

    /// Returns the variables: a dense one on each shard, every worker's ledger, rows and tables on
    /// each shard, and the partitioned ones.
    ///
    /// Their order lets round robin place each on the shard that its name says.
    pub(crate) fn variables(&self) -> Vec<VariableSpec> {
        let mut variables = Vec::new();
        for shard in 0..SHARDS {
            let dense = VariableSpec::f32(dense(shard), [DENSE]);
            variables.push(dense.expect("a correct variable"));
        }
        for worker in 0..WORKERS {
            for chunk in 0..self.chunks {
                // An f16 represents every integer that an entry can reach.
                let ledgers = (0..SHARDS).map(|shard| ledger(worker, chunk, shard));
                let ledgers = ledgers.map(|name| match self.has_halves() {
                    true => VariableSpec::f16(name, [CHUNK]),
                    false => VariableSpec::f32(name, [CHUNK]),
                });
                variables.extend(ledgers.map(|ledger| ledger.expect("a correct variable")));
            }
        }
        for worker in 0..WORKERS {
            let table = |shard| VariableSpec::f32(rows(worker, shard), [ROWS, WIDTH]);
            let tables = (0..SHARDS).map(table);
            variables.extend(tables.map(|table| table.expect("a correct variable").sparse()));
        }
        let large = TableSpec::new(1 << 26).rows_at_once(8);
        let row_bytes = (4 * WIDTH).next_multiple_of(8) + TableSpec::ROW_OVERHEAD_BYTES;
        let bounded = TableSpec::new(CACHED_ROWS * row_bytes).rows_at_once(8);
        let bounded = bounded.eviction(Eviction::LeastRecent);
        for (name, spec) in [(TABLE, large), (CACHE, bounded)] {
            for worker in 0..WORKERS {
                let tables = (0..SHARDS).map(|shard| {
                    let name = table(name, worker, shard);
                    VariableSpec::table(name, DType::F32, [WIDTH], spec)
                });
                variables.extend(tables.map(|table| table.expect("a correct variable")));
            }
        }
        // One partition on each shard.
        let quarters = Partitioner::Fixed { shards: SHARDS as u32 };
        let split = |name: String, rows| VariableSpec::f32(name, [SHARDS as u64 * rows]);
        let mut partitioned = vec![split(ADAM.to_owned(), QUARTER)];
        for worker in 0..WORKERS {
            partitioned.push(split(sums(worker), ROWS));
            let rows = VariableSpec::f32(heavy_rows(worker), [SHARDS as u64 * ROWS, WIDTH]);
            partitioned.push(rows.map(VariableSpec::sparse));
        }
        let partitioned = partitioned.into_iter().map(|spec| spec.expect("a correct variable"));
        variables.extend(partitioned.map(|spec| spec.partitioner(quarters.clone())));
        variables
    }

    /// Returns how many elements a worker's ledger has on a shard.
    pub(crate) fn ledger_elements(&self) -> u64 {
        self.chunks * CHUNK
    }

    /// Reads one ledger variable as f32.
    pub(crate) fn entries(&self, params: &Params, name: &str) -> Result<Vec<f32>, ViewError> {
        Ok(match self.has_halves() {
            true => params.view::<f16>(name)?.iter().map(|value| value.to_f32()).collect(),
            false => params.view::<f32>(name)?.to_vec(),
        })
    }

    /// Returns the ledger entry of a push: its chunk and its element in the chunk.
    pub(crate) fn entry(&self, push: u64) -> (u64, usize) {
        let element = push % self.ledger_elements();
        (element / CHUNK, (element % CHUNK) as usize)
    }

    /// Returns the path of a worker's history.
    pub(crate) fn history(&self, worker: u32) -> PathBuf {
        self.folder.join(format!("worker-{worker}.history.log"))
    }

    /// Returns the path of the stop file. Workers end when it exists.
    pub(crate) fn stop_file(&self) -> PathBuf {
        self.folder.join("stop")
    }
}

/// Returns the addresses of the workers. They are only names, since no task connects to a worker.
/// There is one more than the workers that train.
pub(crate) fn worker_hosts() -> Vec<String> {
    (1..=WORKERS + 1).map(|port| format!("127.0.0.1:{port}")).collect()
}

/// Names the dense variable of a shard. All its elements are equal: the number of updates applied.
pub(crate) fn dense(shard: usize) -> String {
    format!("dense/{shard}")
}

/// The dense variable with one partition on each shard and Adam's slots. Every push has all
/// elements.
pub(crate) const ADAM: &str = "adam";
pub(crate) const ADAM_RATE: f64 = 0.125;

/// Names a worker's dense variable with one partition on each shard: how many of its pushes have
/// each row.
pub(crate) fn sums(worker: u32) -> String {
    format!("sums/{worker}")
}

/// Names a worker's sparse variable with one partition on each shard and a momentum slot. A push
/// has one row of each partition.
pub(crate) fn heavy_rows(worker: u32) -> String {
    format!("momentum/{worker}")
}
pub(crate) const MOMENTUM_RATE: f64 = 1.0;
pub(crate) const MOMENTUM: f64 = 0.5;

/// Returns the same row in all four partitions.
pub(crate) fn in_quarters(row: u64) -> [u64; SHARDS] {
    std::array::from_fn(|quarter| quarter as u64 * ROWS + row)
}

/// Names one variable of a worker's ledger on a shard.
pub(crate) fn ledger(worker: u32, chunk: u64, shard: usize) -> String {
    format!("ledger/{worker}/{chunk}/{shard}")
}

/// Names a worker's sparse variable on a shard.
pub(crate) fn rows(worker: u32, shard: usize) -> String {
    format!("rows/{worker}/{shard}")
}

/// Names a worker's table of one kind on a shard.
pub(crate) fn table(kind: &str, worker: u32, shard: usize) -> String {
    format!("{kind}/{worker}/{shard}")
}

/// The kind of table that holds a row for each entry of the ledger.
pub(crate) const TABLE: &str = "table";
/// The kind of table that holds at most [`CACHED_ROWS`] rows and evicts others.
pub(crate) const CACHE: &str = "cache";
pub(crate) const CACHED_ROWS: u64 = 50;

/// Returns the id of the table row for an entry of the ledger.
pub(crate) fn id(element: u64) -> u64 {
    element.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns the row of a push.
pub(crate) fn row(push: u64) -> u64 {
    push % ROWS
}

const _: () = assert!(CHUNK.is_multiple_of(ROWS));
