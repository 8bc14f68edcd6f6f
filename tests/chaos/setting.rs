//! What the test and its workers agree on: the cluster, and the variables with their places.

use std::path::PathBuf;
use std::time::Duration;

use pushpull::{
    ClusterSpec, DType, Eviction, Params, Partitioner, ShardId, TableSpec, VariableSpec, ViewError,
    f16,
};

/// How many workers train.
pub(crate) const WORKERS: u32 = 3;
/// How many shards there are in all.
pub(crate) const SHARDS: usize = 4;
/// Elements of one ledger variable, the part of a ledger that one push sends.
pub(crate) const CHUNK: u64 = 1024;
/// The rows of a sparse variable of a worker on a shard, each of so many elements. A push has one of
/// them; the parts of the ledger hold a whole number of rounds through them.
pub(crate) const ROWS: u64 = 64;
pub(crate) const WIDTH: u64 = 3;
/// Elements of a dense variable: a push of 1 MiB and a little to each shard is more than one part,
/// and applying it takes long enough for kills to land in the middle.
const DENSE: u64 = 256 << 10;

/// Elements of a quarter of the dense variable that is partitioned and has slots.
pub(crate) const QUARTER: u64 = 1000;
/// How long a worker may be silent, and how long it may hold a token, in clusters whose tasks are stopped
/// and whose links are cut.
pub(crate) const LEASE: Duration = Duration::from_millis(1_000);
pub(crate) const TOKEN_TIMEOUT: Duration = Duration::from_millis(1_800);
/// Longer than both, as it is measured by a server that looks only now and then.
pub(crate) const TOO_LONG: Duration = Duration::from_millis(2_500);

/// One cluster with its variables.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The addresses of the servers, one for each task: as they listen, or as a worker finds them.
    pub(crate) hosts: Vec<String>,
    /// How many ledger variables each worker has on each shard.
    pub(crate) chunks: u64,
    /// Whether steps are synchronous: of two gradients, those of the fastest two of the workers.
    pub(crate) synchronous: bool,
    /// Whether leases and tokens are short, and workers at times compute for longer than that.
    pub(crate) expires: bool,
    /// The folder for logs.
    pub(crate) folder: PathBuf,
}

impl Setting {
    /// How many gradients one step takes.
    pub(crate) fn gradients_per_step(&self) -> u64 {
        if self.synchronous { 2 } else { 1 }
    }

    pub(crate) fn shards_per_task(&self) -> u16 {
        (SHARDS / self.hosts.len()) as u16
    }

    /// The shards of one task.
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

    /// Whether ledgers are of f16, or else of f32. Where no variable is of halves, values are read in the
    /// memory that servers of the same host lend: a worker may be killed while it reads there, and a
    /// server under it.
    pub(crate) fn has_halves(&self) -> bool {
        self.hosts.iter().any(|host| !host.starts_with("unix:"))
    }

    /// A dense variable on each shard, and every worker's ledger, rows and tables on both, declared in turns,
    /// so that round robin puts each where its name says.
    pub(crate) fn variables(&self) -> Vec<VariableSpec> {
        let mut variables = Vec::new();
        for shard in 0..SHARDS {
            let dense = VariableSpec::f32(dense(shard), [DENSE]);
            variables.push(dense.expect("a correct variable"));
        }
        for worker in 0..WORKERS {
            for chunk in 0..self.chunks {
                // An f16 has every whole number that an entry comes to.
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
        let roomy = TableSpec::new(1 << 26).rows_at_once(8);
        let row_bytes = (4 * WIDTH).next_multiple_of(8) + TableSpec::ROW_OVERHEAD_BYTES;
        let tight = TableSpec::new(CACHED_ROWS * row_bytes).rows_at_once(8);
        let tight = tight.eviction(Eviction::LeastRecent);
        for (name, spec) in [(TABLE, roomy), (CACHE, tight)] {
            for worker in 0..WORKERS {
                let tables = (0..SHARDS).map(|shard| {
                    let name = table(name, worker, shard);
                    VariableSpec::table(name, DType::F32, [WIDTH], spec)
                });
                variables.extend(tables.map(|table| table.expect("a correct variable")));
            }
        }
        // In quarters, one on each shard.
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

    /// How many elements a worker's ledger has on a shard.
    pub(crate) fn ledger_elements(&self) -> u64 {
        self.chunks * CHUNK
    }

    /// The values of a part of a ledger.
    pub(crate) fn entries(&self, params: &Params, name: &str) -> Result<Vec<f32>, ViewError> {
        Ok(match self.has_halves() {
            true => params.view::<f16>(name)?.iter().map(|value| value.to_f32()).collect(),
            false => params.view::<f32>(name)?.to_vec(),
        })
    }

    /// Where a push is entered: the chunk, and the element of it.
    pub(crate) fn entry(&self, push: u64) -> (u64, usize) {
        let element = push % self.ledger_elements();
        (element / CHUNK, (element % CHUNK) as usize)
    }

    /// What a worker writes down.
    pub(crate) fn history(&self, worker: u32) -> PathBuf {
        self.folder.join(format!("worker-{worker}.history.log"))
    }

    /// Workers end when this file is there.
    pub(crate) fn stop_file(&self) -> PathBuf {
        self.folder.join("stop")
    }
}

/// Nobody connects to a worker: its address is only a name. There is one more than train.
pub(crate) fn worker_hosts() -> Vec<String> {
    (1..=WORKERS + 1).map(|port| format!("127.0.0.1:{port}")).collect()
}

/// The variable of a shard whose elements are all equal: how many pushes it has applied.
pub(crate) fn dense(shard: usize) -> String {
    format!("dense/{shard}")
}

/// A variable in quarters whose elements are all pushed each time, with the slots of Adam.
pub(crate) const ADAM: &str = "adam";
pub(crate) const ADAM_RATE: f64 = 0.125;

/// A worker's variable in quarters: how many of its pushes have each row.
pub(crate) fn sums(worker: u32) -> String {
    format!("sums/{worker}")
}

/// A worker's sparse variable in quarters, whose rows have a slot of momentum. A push has one row of each
/// quarter.
pub(crate) fn heavy_rows(worker: u32) -> String {
    format!("momentum/{worker}")
}
pub(crate) const MOMENTUM_RATE: f64 = 1.0;
pub(crate) const MOMENTUM: f64 = 0.5;

/// The rows of all quarters for a row of one.
pub(crate) fn in_quarters(row: u64) -> [u64; SHARDS] {
    std::array::from_fn(|quarter| quarter as u64 * ROWS + row)
}

/// A part of a worker's ledger on a shard.
pub(crate) fn ledger(worker: u32, chunk: u64, shard: usize) -> String {
    format!("ledger/{worker}/{chunk}/{shard}")
}

/// A worker's sparse variable on a shard.
pub(crate) fn rows(worker: u32, shard: usize) -> String {
    format!("rows/{worker}/{shard}")
}

/// A worker's table that grows, of one kind, on a shard.
pub(crate) fn table(kind: &str, worker: u32, shard: usize) -> String {
    format!("{kind}/{worker}/{shard}")
}

/// A table that has a row for each entry of the ledger.
pub(crate) const TABLE: &str = "table";
/// One that has room for some of them.
pub(crate) const CACHE: &str = "cache";
pub(crate) const CACHED_ROWS: u64 = 50;

/// The id of the row that belongs to an entry of the ledger.
pub(crate) fn id(element: u64) -> u64 {
    element.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The row that a push has.
pub(crate) fn row(push: u64) -> u64 {
    push % ROWS
}

const _: () = assert!(CHUNK.is_multiple_of(ROWS));
